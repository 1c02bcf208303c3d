"""The only place where the driver waits for other processes.

Three rules hold for every wait: it has a deadline, the first error ends it at once (the other tasks are not waited
for), and what comes out names the process and carries the cause. A remote traceback is kept as a note of the error, so
the panel stays short and the log stays whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from vime_integration.errors import PipelineError

# How often a wait looks up: short enough that a dead engine is noticed at once, long enough to cost nothing.
TICK_S = 0.5


def gather(
    tasks: Mapping[str, Any],
    *,
    doing: str,
    deadline_s: float,
    watch: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Wait until every task has answered.

    Args:
        tasks: Name of the process that was asked -> Ray object reference of its answer.
        doing: What is waited for, as it should read in an error ("start the engines").
        deadline_s: Seconds after which the wait fails.
        watch: Called at every tick; raises when something that the tasks depend on has died.

    Returns:
        Name -> answer, in the order of ``tasks``.

    Raises:
        PipelineError: A process died, or the deadline passed; both name who was still awaited.
        Exception: Whatever a task raised, with the remote traceback as a note.
    """
    pending = {reference: name for name, reference in tasks.items()}
    answers: dict[str, Any] = {}
    end = time.monotonic() + deadline_s
    while pending:
        left = end - time.monotonic()
        if left <= 0:
            raise PipelineError(
                f"{doing} did not finish in time",
                where=", ".join(sorted(pending.values())),
                seen=f"no answer after {deadline_s:g} s",
                expected="an answer from each of them",
                fix="look at their log files in the run folder; raise the deadline if they were still making progress",
            )
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(TICK_S, left))
        for reference in ready:
            name = pending.pop(reference)
            answers[name] = fetch(reference, name=name, doing=doing)
        if watch is not None:
            began = time.monotonic()
            watch()
            end += time.monotonic() - began  # an engine that was started again meanwhile cost the tasks nothing
    return {name: answers[name] for name in tasks}


def fetch(reference: Any, *, name: str, doing: str, deadline_s: float = 60.0) -> Any:
    """Return the answer behind one reference, or raise what the task raised.

    Raises:
        PipelineError: The process behind the reference is dead, or its answer did not arrive in time.
        Exception: The task's own error.
    """
    try:
        return ray.get(reference, timeout=deadline_s)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(f"raised in {name} while it was asked to {doing}:\n{error}")
        raise cause from None
    except RayActorError as error:
        raise PipelineError(
            "a process of the run died",
            where=name,
            seen=str(error).strip().splitlines()[0],
            expected=f"that it would {doing}",
            fix="its log file in the run folder holds the last it said; `dmesg` tells whether it ran out of memory",
        ) from error
    except GetTimeoutError as error:
        raise PipelineError(
            f"{doing}: the answer did not arrive", where=name, seen=f"nothing after {deadline_s:g} s"
        ) from error
