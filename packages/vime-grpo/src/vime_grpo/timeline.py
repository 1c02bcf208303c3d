"""The timeline of a run: when each phase of each step began and ended, in every lane, on one clock.

Seconds per phase tell what a step costs; only begins and ends tell what waited for what, and whether generation and
training really ran at the same time. One line of ``phases.jsonl`` is one span.

Clock. The processes of a run are on one host and take times from its monotonic clock (``time.monotonic``), which is the
same in all of them and never jumps. The writer adds what makes UNIX time of it, read once when it is opened, so a span
can be looked up in the logs. A resumed run may have another host clock; it writes the next *session*, and `run_clock`
puts sessions one behind the other. So time between a stop and its resume is in no timeline, nor is a step that was lost
with a kill: the file is cut to the step that is resumed after, as every file of steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from vime_grpo.errors import MetricsError
from vime_grpo.step_file import StepFile, read_steps


@dataclass(frozen=True, slots=True)
class Span:
    """One phase from its begin to its end.

    Attributes:
        step: The step that it belongs to.
        lane: Who was at work: ``rollout``, ``trainer``, ``sync``, ``offload``, ``save``, ``eval``, or another name.
        phase: What was done.
        begin: When it began, seconds of one clock.
        end: When it ended.
        session: How often the run had been resumed before.
    """

    step: int
    lane: str
    phase: str
    begin: float
    end: float
    session: int = 0


def read_timeline(path: str | Path) -> list[Span]:
    """Read the timeline of a run.

    Args:
        path: ``phases.jsonl``; times in it are UNIX time.

    Returns:
        Its spans, in the order of the file. A last line without its end is left out.

    Raises:
        MetricsError: The file cannot be read, or a line is not a span; names file and line.
    """
    spans = []
    for number, row in enumerate(read_steps(path, "phases"), start=1):
        where = f"{path}, line {number}"
        try:
            # Further keys are of a later version; what this one knows can still be read.
            span = Span(**{name: row[name] for name in Span.__dataclass_fields__})
            forward = span.begin <= span.end < math.inf
        except (KeyError, TypeError) as error:
            raise MetricsError("not a span", where=where, seen=f"{type(error).__name__}: {error}") from error
        if not forward:
            raise MetricsError("a span ends before it begins", where=where, seen=f"from {span.begin} to {span.end}")
        spans.append(span)
    return spans


def run_clock(spans: Iterable[Span]) -> list[Span]:
    """Return spans in seconds since the run's first began, without the time between its sessions.

    Args:
        spans: Of a whole timeline.

    Returns:
        The same spans, ordered by session and begin. A session begins where the one before ended.
    """
    sessions: dict[int, list[Span]] = {}
    for span in spans:
        sessions.setdefault(span.session, []).append(span)
    moved: list[Span] = []
    offset = 0.0
    for _, own in sorted(sessions.items()):
        first = min(span.begin for span in own)
        shifted = [replace(s, begin=s.begin - first + offset, end=s.end - first + offset) for s in own]
        moved += sorted(shifted, key=lambda span: (span.begin, span.end))
        offset = max(span.end for span in shifted)
    return moved


class TimelineWriter:
    """Keeps spans and appends them to ``phases.jsonl`` when a step is over.

    Args:
        path: The file; its folder is made.
        resume_step: Continue a file after this step: spans of later steps are cut off. None starts an empty file.

    Raises:
        MetricsError: The file cannot be read or written.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        """Open the file, cut to the step to resume after."""
        self.path = Path(path)
        kept: Sequence[Span] = []
        if resume_step is not None and self.path.exists():
            # A run that an older version began has no timeline until now.
            kept = [span for span in read_timeline(self.path) if span.step <= resume_step]
        self._session = max((span.session for span in kept), default=-1) + 1
        self._to_unix = time.time() - time.monotonic()
        self._pending: list[Span] = []
        self._file = StepFile(self.path, "phases", [asdict(span) for span in kept])

    def add(self, step: int, lane: str, phase: str, begin: float, end: float) -> None:
        """Keep a span until the next ``write``.

        Args:
            step: The step that it belongs to.
            lane: Who was at work.
            phase: What was done.
            begin: When it began, by ``time.monotonic`` of any process of this host.
            end: When it ended, likewise.
        """
        # A tenth of a millisecond is below what any phase means.
        first, last = (round(moment + self._to_unix, 4) for moment in (begin, end))
        self._pending.append(Span(step, lane, phase, first, last, self._session))

    def write(self) -> None:
        """Append what was kept, in one piece.

        Raises:
            MetricsError: The disk refuses.
        """
        pending, self._pending = sorted(self._pending, key=lambda span: (span.step, span.begin)), []
        if pending:
            self._file.append([asdict(span) for span in pending])

    def close(self) -> None:
        """Write what is left, such as the last save, and close the file."""
        try:
            self.write()
        finally:
            self._file.close()

    def __enter__(self) -> TimelineWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()
