"""``vime-grpo accept``: one command that a person with the hardware runs, and one file that says what it showed.

::

    doctor              the checks of `vime-grpo doctor`, on the platform as asked
    mask_ab             the reference fault of colocated weight sync on HIP, without and with the cure
    ipc_probe           memory of every GPU, opened under every mask
    sync_bench          weights between two processes, with digests
    grpo_colocated      `vime-grpo train`, engines and trainer sharing the GPUs
    grpo_async          asynchronously; on disjoint pools, if there are two GPUs
    logprob_difference  how far trainer and engine disagreed in those runs
    throughput          how fast they were

Each stage is a process with a deadline (`supervise`); one that fails, hangs or dies hides none of the others. The
folder gets ``manifest.json`` (chip, driver, runtime, versions, commits; for each stage every comparison with what was
seen and what was expected), ``page.md`` (the same for people), ``logs/`` and ``runs/``. The exit code is 0 where no
stage failed and 4 where one did. A skipped stage is no failure, and its reason stands on the page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vime_integration.accept.record import Acceptance, Outcome, Report, StageResult, Threshold

if TYPE_CHECKING:
    from vime_integration.accept.command import STAGES, run_accept

__all__ = ["STAGES", "Acceptance", "Outcome", "Report", "StageResult", "Threshold", "run_accept"]

# The process of every stage imports this package: what only the command needs waits until it is asked for.
_LAZY = ("STAGES", "run_accept")


def __getattr__(name: str) -> Any:
    """Import a part of the command at first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.command"), name)
