"""Runs one stage in a process group of its own, with a deadline; whatever it does, the next stage gets its turn.

A stage may hang in a driver, abort in a library or be killed for its memory. So it is a process: it writes its report
to a file, everything it prints goes to its log, and at the deadline the whole group is asked to end and then made to.
What is left of the stage is its log, whose end is the reason in the manifest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vime_integration.accept.record import Acceptance, Outcome, Report, StageResult, report_from_json

GRACE_S = 30.0  # between the polite and the forced end: a run saves, engines end their process trees
TAIL_LINES = 12
WORKER = (sys.executable, "-m", "vime_integration.accept.worker")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: As it stands in the manifest.
        function: ``module:function``; it takes an `Acceptance` and returns a `Report`.
        deadline_s: Seconds that it may take.
        title: One clause for the page.
    """

    name: str
    function: str
    deadline_s: float
    title: str


@contextmanager
def ending_with_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an orderly exit within the block, so that the stage that runs then is ended as well.

    A stage is in a session of its own: whoever ends this process by its group does not reach it.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_stage(stage: Stage, acceptance: Acceptance, worker: Sequence[str] = WORKER) -> StageResult:
    """Run one stage to its end, or to its deadline.

    Args:
        stage: The stage.
        acceptance: What is accepted.
        worker: Command of a stage's process.

    Returns:
        Its result; this never raises for what the stage did.
    """
    log = acceptance.out / "logs" / f"{stage.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    relative = str(log.relative_to(acceptance.out))
    answer = acceptance.out / "logs" / f"{stage.name}.json"
    answer.unlink(missing_ok=True)
    request = json.dumps({"function": stage.function, "answer": str(answer), "acceptance": acceptance.to_json()})
    started = time.monotonic()
    ended = _run([*worker, request], log, stage.deadline_s * acceptance.patience)
    seconds = time.monotonic() - started
    if ended is None:
        reason = f"no end within {stage.deadline_s * acceptance.patience:g} s; last in its log: {_tail(log)}"
        return StageResult(stage.name, Outcome.FAIL, seconds, reason, Report(), relative)
    return _judge(stage, answer, log, ended, seconds, relative)


def _judge(stage: Stage, answer: Path, log: Path, status: int, seconds: float, relative: str) -> StageResult:
    if not answer.is_file():
        reason = f"ended with status {status} and without a report; last in its log: {_tail(log)}"
        return StageResult(stage.name, Outcome.FAIL, seconds, reason, Report(), relative)
    data = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in data:
        return StageResult(stage.name, Outcome.FAIL, seconds, data["error"], Report(), relative)
    report = report_from_json(data)
    if report.skipped:
        return StageResult(stage.name, Outcome.SKIP, seconds, report.skipped, report, relative)
    broken = [f"{t.name}: {t.seen}, expected {t.expected}" for t in report.thresholds if not t.holds]
    if not report.thresholds:
        broken = ["nothing was compared"]
    return StageResult(
        stage.name, Outcome.FAIL if broken else Outcome.PASS, seconds, "; ".join(broken), report, relative
    )


def _run(command: Sequence[str], log: Path, deadline_s: float) -> int | None:
    """Run a command in a session of its own; return its exit status, or None where the deadline passed."""
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - our own worker
            list(command), stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group: politely, then by force; also after the stage itself has ended."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + wait_s
        while time.monotonic() < end and _alive(process):
            time.sleep(0.1)
    process.wait(GRACE_S)


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # reaps the leader, which would otherwise keep the group alive as a zombie
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:])[-1200:] or "nothing"
