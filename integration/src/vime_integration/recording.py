"""The record of a run: what is kept of each step, and in which order.

The metrics file comes first, because a resume counts on it; what else is written can be made again from a replay of the
step, or lost with it. Nothing here holds a step back: what is shown is shown after it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime_grpo import Display, MetricsWriter, SamplesWriter, TimelineWriter, Tracker

from vime_integration.actors.rollout import RolloutReport
from vime_integration.ledger import Ledger


class RunRecorder:
    """Keeps and shows finished steps.

    Args:
        writer: The metrics file.
        ledger: The ledger of prompts.
        samples: The samples worth reading.
        timeline: When each phase was.
        trackers: Where metrics are shown besides.
        display: The screen.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        ledger: Ledger,
        samples: SamplesWriter,
        timeline: TimelineWriter,
        trackers: Sequence[Tracker],
        display: Display,
    ) -> None:
        """Keep the parts; their owner closes them."""
        self._writer = writer
        self._ledger = ledger
        self._samples = samples
        self._timeline = timeline
        self._trackers = trackers
        self._display = display

    def log(self, step: int, metrics: dict[str, float], rollout: RolloutReport) -> None:
        """Keep and show one finished step."""
        self._writer.write(step, metrics)
        self._ledger.write(step, rollout.ledger)
        if rollout.samples:
            self._samples.write(step, rollout.samples)
        for lane, phase, begin, end in rollout.spans:
            self._timeline.add(step, lane, phase, begin, end)
        self._timeline.write()
        for tracker in self._trackers:
            tracker.log(step, metrics)
        self._display.step(step, metrics)

    def span(self, step: int, lane: str, phase: str, begin: float, end: float) -> None:
        """Keep when a phase was; it is written with the next finished step, or at the run's end."""
        self._timeline.add(step, lane, phase, begin, end)

    def note(self, text: str) -> None:
        """Show one line."""
        self._display.note(text)
