"""The data buffer: every prompt that goes in comes out exactly once, as a trained group or as a counted loss.

A prompt is *begun* when it is handed to generation, *admitted* as a scored group, and *taken* for training. The buffer
remembers the begun ones, so that its state names what was in flight: after a resume they are generated again. Groups
leave in the order of their prompts' positions (oldest first), which keeps the lag small and the order repeatable.

Lag rule. The lag of a group, for training with weights of version v, is v minus the version of the oldest token in it.
``take`` hands out no group whose lag exceeds ``max_lag``: such a group is *expired*. ``on_expired="drop"`` drops it,
``"refresh"`` puts its prompt into the queue of prompts to be generated again; both are counted.

Everything is JSON in ``state_dict``. Not thread-safe: it belongs to one event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vime_rollout.errors import DataBufferError, StateError
from vime_rollout.sample import Prompt, SampleGroup

_FORMAT = 1


@dataclass(slots=True)
class BufferCounts:
    """What has happened to prompts since the start of the run.

    ``begun = admitted + abandoned + in flight`` and ``admitted = taken + expired + inside`` hold at all times.

    Args:
        begun: Prompts handed to generation, replays included.
        admitted: Groups that came in.
        taken: Groups handed out for training.
        expired_dropped: Groups dropped because they were too old.
        expired_refreshed: Groups whose prompt was queued to be generated again.
        abandoned: Prompts given up before their group came in.
    """

    begun: int = 0
    admitted: int = 0
    taken: int = 0
    expired_dropped: int = 0
    expired_refreshed: int = 0
    abandoned: int = 0


class DataBuffer:
    """Admits scored groups and hands them out; see the module's docstring.

    Args:
        capacity: Most groups inside; ``None``: no bound.
        max_lag: Largest lag that may be trained on, in versions; ``None``: any.
        on_expired: What becomes of an older group.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        max_lag: int | None = None,
        on_expired: Literal["drop", "refresh"] = "drop",
    ) -> None:
        """Begin empty."""
        self._capacity = capacity
        self._max_lag = max_lag
        self._on_expired = on_expired
        self._groups: dict[str, SampleGroup] = {}
        self._in_flight: dict[str, Prompt] = {}
        self._replay: list[Prompt] = []
        self.counts = BufferCounts()

    def __len__(self) -> int:
        """Number of groups inside."""
        return len(self._groups)

    @property
    def in_flight(self) -> int:
        """Prompts begun whose group has not come in."""
        return len(self._in_flight)

    @property
    def room(self) -> int | None:
        """Prompts that may be begun before the buffer could overflow; ``None``: no bound."""
        if self._capacity is None:
            return None
        return max(0, self._capacity - len(self._groups) - len(self._in_flight))

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Note that these prompts are handed to generation.

        Raises:
            DataBufferError: When one is in flight or inside already, or there is no room for all.
        """
        for prompt in prompts:
            if prompt.group_id in self._in_flight or prompt.group_id in self._groups:
                raise DataBufferError("prompt is begun twice", where=f"group {prompt.group_id}")
        if self.room is not None and len(prompts) > self.room:
            raise DataBufferError(
                "no room in the buffer", seen=f"{len(prompts)} prompts", expected=f"at most {self.room}"
            )
        self._in_flight.update({p.group_id: p for p in prompts})
        self.counts.begun += len(prompts)

    def admit(self, group: SampleGroup) -> None:
        """Take in a scored group of a prompt that was begun.

        Raises:
            DataBufferError: When it is not scored, was not begun, or is inside already.
        """
        group_id = group.prompt.group_id
        if not group.is_scored:
            raise DataBufferError("group is not scored", where=f"group {group_id}", fix="score every sample first")
        if group_id not in self._in_flight:
            known = "is inside already" if group_id in self._groups else "was not begun"
            raise DataBufferError(f"group {known}", where=f"group {group_id}", expected="begin, then admit, once each")
        del self._in_flight[group_id]
        self._groups[group_id] = group
        self.counts.admitted += 1

    def abandon(self, group_id: str, *, replay: bool = False) -> None:
        """Give up a prompt in flight; with ``replay`` it is queued to be generated again.

        Raises:
            DataBufferError: When it is not in flight.
        """
        prompt = self._in_flight.pop(group_id, None)
        if prompt is None:
            raise DataBufferError("group is not in flight", where=f"group {group_id}")
        self.counts.abandoned += 1
        if replay:
            self._replay.append(prompt)

    def take(self, n: int, *, version: int) -> list[SampleGroup]:
        """Hand out up to ``n`` groups for training, oldest prompt first, after expiring those that are too old.

        Args:
            n: Most groups.
            version: Version of the weights that will be trained.

        Returns:
            At most ``n`` groups; fewer when there are not enough young ones.
        """
        self.expire(version)
        order = sorted(self._groups.values(), key=lambda g: g.prompt.position)
        taken = order[:n]
        for group in taken:
            del self._groups[group.prompt.group_id]
        self.counts.taken += len(taken)
        return taken

    def ready(self, n: int) -> bool:
        """Tell whether the ``n`` prompts of the lowest positions, of those inside and in flight, are all inside.

        Who takes only then takes every prompt in the order of the data, whatever finished first: the batch does not
        favour short answers, and a long one cannot be overtaken until it is too old.
        """
        inside = [(g.prompt.position, True) for g in self._groups.values()]
        begun = [(p.position, False) for p in self._in_flight.values()]
        leading = sorted([*inside, *begun])[:n]
        return len(leading) == n and all(done for _, done in leading)

    def available(self, version: int) -> int:
        """Return how many groups ``take`` could hand out now."""
        return sum(not self._too_old(group, version) for group in self._groups.values())

    def lags(self, version: int) -> list[int]:
        """Return the lag of each group inside, for a histogram."""
        return [version - oldest for g in self._groups.values() if (oldest := g.oldest_version) is not None]

    def replays(self, most: int | None = None) -> list[Prompt]:
        """Take out the prompts that wait to be generated again, lowest position first.

        Args:
            most: At most so many; ``None`` takes all.
        """
        order = sorted(self._replay, key=lambda prompt: prompt.position)
        self._replay = [] if most is None else order[most:]
        return order[:most]

    def _too_old(self, group: SampleGroup, version: int) -> bool:
        oldest = group.oldest_version
        return self._max_lag is not None and oldest is not None and version - oldest > self._max_lag

    def expire(self, version: int) -> list[Prompt]:
        """Drop, or queue again, every group that is too old to be trained on with weights of ``version``.

        Returns:
            The prompts of the expired groups.
        """
        expired = [group for group in self._groups.values() if self._too_old(group, version)]
        for group in expired:
            del self._groups[group.prompt.group_id]
            if self._on_expired == "refresh":
                self._replay.append(group.prompt)
                self.counts.expired_refreshed += 1
            else:
                self.counts.expired_dropped += 1
        return [group.prompt for group in expired]

    def state_dict(self) -> dict[str, Any]:
        """Return groups, prompts in flight, replays and counts as JSON values."""
        return {
            "format": _FORMAT,
            "groups": [g.to_dict() for g in self._groups.values()],
            "in_flight": [p.to_dict() for p in self._in_flight.values()],
            "replay": [p.to_dict() for p in self._replay],
            "counts": dataclasses.asdict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        What was in flight has no running request any more: it is abandoned, and queued to be generated again.

        Raises:
            StateError: When the state has another format.
            SampleError: When a saved sample is not whole.
        """
        if state.get("format") != _FORMAT:
            raise StateError("buffer state of another format", seen=str(state.get("format")), expected=str(_FORMAT))
        groups = [SampleGroup.from_dict(g) for g in state["groups"]]
        lost = [Prompt.from_dict(p) for p in state["in_flight"]]
        self._groups = {g.prompt.group_id: g for g in groups}
        self._in_flight = {}
        self._replay = [*lost, *(Prompt.from_dict(p) for p in state["replay"])]
        self.counts = BufferCounts(**state["counts"])
        self.counts.abandoned += len(lost)
