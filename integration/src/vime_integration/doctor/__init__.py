"""``vime-grpo doctor``: what will go wrong, before anything expensive starts.

::

    host            host.py             system, memory, /dev/shm, open files, disk, ports, names, proxies
    devices         devices.py          platform, visibility, vime-devices' preflight, free memory
    packages        packages.py         versions, requirements, one vLLM, the interface that the sync plugin needs
    configuration   configuration.py    model, data, reward, placement, memory of every phase, disk

One line a check: how it came out, its name, what was seen, what was expected and what to do. A check that fails or
cannot be made hides none of the others. The exit code is 0 where nothing failed and 4 where something did: what
``vime-grpo`` answers when a run fails for a reason that the message explains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vime_devices import Platform, detect_platform
from vime_grpo import RunConfig

from vime_integration.doctor.configuration import Machine, check_configuration
from vime_integration.doctor.devices import check_devices
from vime_integration.doctor.findings import Check, Status, guarded
from vime_integration.doctor.host import Host, check_host
from vime_integration.doctor.packages import check_packages

EXIT_FAILED = 4

__all__ = ["Check", "Machine", "Status", "examine", "run_doctor"]


def examine(config: RunConfig | None = None, *, expect: Platform | None = None) -> Iterator[Check]:
    """Make every check, in order, each as soon as its line is known.

    Args:
        config: A resolved configuration to hold against this host; None checks the host alone.
        expect: The platform that must be here; None takes what is.
    """
    gpu = expect in (Platform.HIP, Platform.CUDA) if expect is not None else _has_gpu()
    host = Host()
    yield from guarded("host", lambda: check_host(host, gpu=gpu))
    yield from guarded("devices", lambda: check_devices(expect))
    yield from guarded("packages", check_packages)
    if config is not None:
        yield from guarded("config", lambda: check_configuration(config))


def run_doctor(config: RunConfig | None = None, *, as_json: bool = False, out: Path | None = None) -> int:
    """Check this host, and a configuration if there is one; write one line a check to standard output.

    Args:
        config: The resolved configuration.
        as_json: Write one JSON object instead: ``{"status": ..., "checks": [...]}``.
        out: Also write that object into this file.

    Returns:
        0, or 4 where a check failed.
    """
    checks = []
    for check in examine(config):
        checks.append(check)
        if not as_json:
            _write(check.line())
    failed = [check.name for check in checks if check.status is Status.FAIL]
    record = {"status": "fail" if failed else "ok", "checks": [check.to_json() for check in checks]}
    text = json.dumps(record, indent=2)
    if as_json:
        _write(text)
    else:
        count = {status: sum(check.status is status for check in checks) for status in Status}
        _write(f"{count[Status.OK]} ok, {count[Status.WARN]} warnings, {count[Status.FAIL]} failed")
        if failed:
            _write(f"failed: {', '.join(failed)}")
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return EXIT_FAILED if failed else 0


def _has_gpu() -> bool:
    # Where both vendors' devices are, the devices' own check says what to do about it.
    from vime_devices import PlatformError

    try:
        return detect_platform() is not Platform.CPU
    except PlatformError:
        return True


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
