"""Named phases of a step, with the seconds that each took.

A pipeline is a short list of phases; what each costs is a metric, so a slow step can be read off the log. The metric
names are those of the field where it has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Phases:
    """Seconds per phase of one step.

    Args:
        step: Its number, for the log.
        show: Told the name of each phase as it begins.
    """

    def __init__(self, step: int, show: Callable[[str], None] = lambda _phase: None) -> None:
        """Start the step's clock."""
        self._step = step
        self._show = show
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; a phase entered twice adds up.

        Args:
            name: What it does: "rollout", "train", "update_weights", ...
        """
        self._show(name.replace("_", " "))
        logger.info("step %d: %s", self._step, name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """Return ``perf/<phase>_time`` for each phase and ``perf/step_time``, in seconds."""
        times = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()}
        return times | {"perf/step_time": time.perf_counter() - self._started}
