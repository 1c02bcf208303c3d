"""The rollout of a colocated step: the next prompts of the data, answered by one version of the weights.

Which groups make up a step is decided in the order of the data (`vime_rollout.experimental.Collector`): the first
``batch`` prompts whose groups are kept, whatever finished first. What was begun and not needed comes first in the next
step, with what was already generated of it where ``rollout.partial`` asks for that.

Invariant. Every prompt that is drawn is trained on, dropped with a reason, or waiting, which is part of the state; so a
resume continues the walk over the data exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vime_rollout import DataSource, GroupFilter, Rollout, SampleGroup
from vime_rollout.experimental import Collector

from vime_integration.ledger import LedgerEntry


@dataclass(frozen=True)
class Collected:
    """One rollout.

    Attributes:
        groups: In the order of their prompts.
        ledger: What became of prompts.
        metrics: ``rollout/dropped_groups``, ``rollout/waiting_prompts`` and, with partial samples, ``partial/*``.
    """

    groups: list[SampleGroup]
    ledger: LedgerEntry
    metrics: dict[str, float]


class StepCollector:
    """Makes the rollouts of a colocated run.

    Args:
        rollout: Generates and scores.
        source: Where prompts come from.
        batch: Groups of one step.
        ahead: Prompts begun beyond the batch.
        keep: Decides about a group.
    """

    def __init__(self, rollout: Rollout, source: DataSource, *, batch: int, ahead: int, keep: GroupFilter) -> None:
        """Draw nothing yet."""
        self._rollout, self._source, self._batch = rollout, source, batch
        self._collector = Collector(rollout, source.next, keep=keep, ahead=ahead)

    async def collect(self, version: int) -> Collected:
        """Make the rollout of one step; what it generates comes from ``version``.

        Raises:
            RolloutError: Generation or scoring failed, or too few groups pass the filter.
        """
        found = await self._collector.step(self._batch, version=version)
        dropped = [(prompt.position, reason) for prompt, reason in found.dropped]
        entry = LedgerEntry([group.prompt.position for group in found.groups], dropped)
        metrics = {
            "rollout/dropped_groups": float(len(dropped)),
            "rollout/waiting_prompts": float(len(self._collector.waiting)),
        }
        if self._rollout.partial is not None:
            counts = asdict(self._rollout.partial.counts)
            metrics |= {f"partial/{name}": float(count) for name, count in counts.items()}
        return Collected(list(found.groups), entry, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, waiting prompts and partial samples, as JSON values."""
        return {"source": self._source.state_dict(), "collector": self._collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: It belongs to other data.
        """
        self._source.load_state_dict(state["source"])
        self._collector.load_state_dict(state["collector"])
