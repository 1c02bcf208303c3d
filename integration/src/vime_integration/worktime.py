"""When generation that goes on by itself worked, when it waited, and when each batch was made.

Working is having at least one group in flight; all other time since the start is waiting for the trainer. Times are by
``time.monotonic``, which the processes of a host share, so the driver can put them beside its own phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Worked:
    """How generation spent the time since the last batch was taken.

    Attributes:
        busy: Begin and end of each stretch in which something was in flight.
        idle_s: Seconds in which nothing was.
        made: From the begin of the batch's first group to the end of its last; None where none was made here.
    """

    busy: list[tuple[float, float]]
    idle_s: float
    made: tuple[float, float] | None


class WorkTime:
    """Keeps the times of one producer.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing started."""
        self._clock = clock
        self._since: float | None = None
        self._working = False
        self._busy: list[tuple[float, float]] = []
        self._idle_s = 0.0
        self._begun: dict[str, float] = {}
        self._made: dict[str, tuple[float, float]] = {}

    def working(self, is_working: bool) -> None:
        """Note whether something is in flight now."""
        if self._since is None:
            self._since = self._clock()
        elif is_working != self._working:
            self._settle()
        self._working = is_working

    def begin(self, group_id: str) -> None:
        """Note that a group is begun."""
        self._begun[group_id] = self._clock()

    def done(self, group_id: str) -> None:
        """Note that a group is finished and waits for the trainer."""
        self._made[group_id] = (self._begun.pop(group_id), self._clock())

    def forget(self, group_id: str) -> None:
        """Note that a group will not be taken."""
        self._begun.pop(group_id, None)
        self._made.pop(group_id, None)

    def taken(self, group_ids: Iterable[str]) -> Worked:
        """Return the times since the last call, and those of the groups that are taken now.

        Args:
            group_ids: Of the batch; groups of before a resume have no times.
        """
        if self._since is not None:
            self._settle()
        known = [span for group_id in group_ids if (span := self._made.pop(group_id, None)) is not None]
        made = (min(begin for begin, _ in known), max(end for _, end in known)) if known else None
        worked = Worked(self._busy, self._idle_s, made)
        self._busy, self._idle_s = [], 0.0
        return worked

    def _settle(self) -> None:
        """Count the stretch that ends now."""
        assert self._since is not None
        now = self._clock()
        if self._working and now > self._since:
            self._busy.append((self._since, now))
        elif not self._working:
            self._idle_s += now - self._since
        self._since = now
