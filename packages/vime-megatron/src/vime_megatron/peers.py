"""What ranks say to each other besides tensors: small values, and whether all of them succeeded.

The ranks of a trainer talk in its default group; a checkpoint that is written in the background talks in one of its
own, so that it never meets the collectives of a step that runs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from vime_devices import VimeError

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """All ranks of a trainer, in one process group.

    Attributes:
        rank: This rank.
        size: Number of ranks; with one nothing is sent.
        group: The group, or ``None`` for the default one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Collect one small value from every rank on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        """Collect one value from every rank on rank 0; the others get an empty list."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def deal(self, value: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Let rank 0 work on a value from every rank, and hand each rank its own result.

        Args:
            value: This rank's value.
            work: Called on rank 0 with all values; returns one result for each rank.

        Returns:
            This rank's result.
        """
        values = self.collect(value)
        results = list(work(values)) if self.rank == 0 else None
        if self.size == 1:
            assert results is not None
            return results[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, results, src=0, group=self.group)
        return mine[0]

    def failures(self, problem: str) -> list[str]:
        """Tell every rank what went wrong on any.

        Args:
            problem: What went wrong here; empty when nothing did.

        Returns:
            The problems of all ranks, each with its rank; empty when all went well.
        """
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]

    def agree(self, action: Callable[[], T], tell: Callable[[str], Exception]) -> T:
        """Run an action on every rank; where it fails on one, no rank goes on to wait for that one.

        Args:
            action: What to do; it waits for no other rank.
            tell: Makes the error of the ranks where it went well from the problems of the others.

        Returns:
            This rank's result.

        Raises:
            VimeError: What the action raised here, or what ``tell`` made.
            OSError: Likewise.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except (VimeError, OSError) as error:
            failure = error
        problems = self.failures("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        if problems:
            raise tell("; ".join(problems))
        return cast("T", result)
