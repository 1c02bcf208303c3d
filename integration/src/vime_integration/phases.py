"""Named phases of a step, with the seconds that each took, and when.

A pipeline is a short list of phases; what each costs is a metric, so a slow step can be read off the log. The metric
names are those of the field where it has them. When a phase began and ended goes into the run's timeline, in the lane
of those who work in it (`vime_grpo.timeline`). Where a worker tells better than the driver what it did when, the
driver's own view is left out: the trainer's of its training, and that of generation which goes on by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

#: Told step, lane, phase, begin and end; times by ``time.monotonic``.
Note = Callable[[int, str, str, float, float], None]
#: Phase of the driver -> its lane in the timeline.
LANES = {
    "rollout": "rollout",
    "wait_for_rollout": "trainer",
    "update_weights": "sync",
    **dict.fromkeys(("offload", "onload", "sleep", "wake"), "offload"),
}


class Phases:
    """Seconds per phase of one step.

    Args:
        step: Its number, for the log.
        show: Told the name of each phase as it begins.
        note: Told when each phase of a lane was.
    """

    def __init__(
        self, step: int, show: Callable[[str], None] = lambda _phase: None, note: Note = lambda *_span: None
    ) -> None:
        """Start the step's clock."""
        self._step = step
        self._show = show
        self._note = note
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; a phase entered twice adds up.

        Args:
            name: What it does: "rollout", "train", "update_weights", ...
        """
        self._show(name.replace("_", " "))
        logger.info("step %d: %s", self._step, name)
        begun = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self.seconds[name] = self.seconds.get(name, 0.0) + ended - begun
            if name in LANES:
                self._note(self._step, LANES[name], name, begun, ended)

    def metrics(self) -> dict[str, float]:
        """Return ``perf/<phase>_time`` for each phase and ``perf/step_time``, in seconds."""
        times = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()}
        return times | {"perf/step_time": time.monotonic() - self._started}
