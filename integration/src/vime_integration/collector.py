"""The rollout of a colocated step: the next prompts of the data, answered by one version of the weights.

Without a filter a step takes the next ``batch`` prompts. With one, or with prompts begun beyond the batch, which groups
make it up is decided in the order of the data (`vime_rollout.experimental.collect`): the first ``batch`` prompts whose
groups are kept, whatever finished first. What was begun and not needed comes first in the next step.

Invariant. Every prompt that is drawn is trained on, dropped with a reason, or among the unused ones, which are part of
the state; so a resume continues the walk over the data exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vime_rollout import DataSource, GroupFilter, Prompt, Rollout, SampleGroup
from vime_rollout.experimental import collect

from vime_integration.ledger import LedgerEntry


@dataclass(frozen=True)
class Collected:
    """One rollout.

    Attributes:
        groups: In the order of their prompts.
        ledger: What became of prompts.
        metrics: ``rollout/dropped_groups`` and ``rollout/unused_prompts``, where there can be any.
    """

    groups: list[SampleGroup]
    ledger: LedgerEntry
    metrics: dict[str, float]


class Collector:
    """Makes the rollouts of a colocated run.

    Args:
        rollout: Generates and scores.
        source: Where prompts come from.
        batch: Groups of one step.
        ahead: Prompts begun beyond the batch.
        keep: Decides about a group; None keeps all.
    """

    def __init__(
        self, rollout: Rollout, source: DataSource, *, batch: int, ahead: int = 0, keep: GroupFilter | None = None
    ) -> None:
        """Draw nothing yet."""
        self._rollout, self._source = rollout, source
        self._batch, self._ahead, self._keep = batch, ahead, keep
        self._unused: list[Prompt] = []

    async def collect(self, version: int) -> Collected:
        """Make the rollout of one step; every token comes from ``version``.

        Raises:
            RolloutError: Generation or scoring failed, or too few groups pass the filter.
        """
        if self._keep is None and not self._ahead:
            groups = await self._rollout.run(self._draw(self._batch), version=version)
            return Collected(groups, LedgerEntry([group.prompt.position for group in groups]), {})
        keep = self._keep or (lambda _group: "")
        found = await collect(self._rollout, self._draw, self._batch, ahead=self._ahead, keep=keep, version=version)
        self._unused = [*found.unused, *self._unused]
        dropped = [(prompt.position, reason) for prompt, reason in found.dropped]
        entry = LedgerEntry([group.prompt.position for group in found.groups], dropped)
        metrics = {"rollout/dropped_groups": float(len(dropped)), "rollout/unused_prompts": float(len(self._unused))}
        return Collected(list(found.groups), entry, metrics)

    def _draw(self, n: int) -> list[Prompt]:
        first, self._unused = self._unused[:n], self._unused[n:]
        return first + self._source.next(n - len(first)) if len(first) < n else first

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the unused prompts, as JSON values."""
        return {"source": self._source.state_dict(), "unused": [prompt.to_dict() for prompt in self._unused]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateError: It belongs to other data.
        """
        self._source.load_state_dict(state["source"])
        self._unused = [Prompt.from_dict(prompt) for prompt in state["unused"]]
