"""Stage ``doctor``: the checks of ``vime-grpo doctor``, with the run's own configuration, on the platform as asked."""

from __future__ import annotations

from vime_devices import Platform

from vime_integration.accept.output import say
from vime_integration.accept.record import Acceptance, Report, Threshold
from vime_integration.accept.runs import Mode, run_config, usable_gpus
from vime_integration.doctor import Status, examine


def doctor(acceptance: Acceptance) -> Report:
    """Run the doctor; a failed check fails the stage.

    Args:
        acceptance: What is accepted.
    """
    checks = []
    for check in examine(run_config(acceptance, Mode.COLOCATED), expect=acceptance.devices):
        checks.append(check)
        say(check.line())
    failed = [check.line() for check in checks if check.status is Status.FAIL]
    thresholds = [Threshold("checks that failed", " | ".join(failed) or "none", "none", not failed)]
    if acceptance.devices is not Platform.CPU:
        there, wanted = usable_gpus(acceptance), acceptance.gpus or 1
        thresholds.append(Threshold("visible GPUs", str(there), f"at least {wanted}", there >= wanted))
    warnings = [check.line() for check in checks if check.status is Status.WARN]
    return Report(thresholds, {"checks": len(checks), "warnings": warnings})
