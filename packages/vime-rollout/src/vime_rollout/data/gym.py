"""Prompts from a reasoning-gym task: generated from a seed, scored by the task itself.

A task's entry number i is a pure function of (task, seed, size, options, i). A prompt therefore carries these five in
its metadata under ``"gym"`` instead of the entry: they are JSON, they survive a checkpoint, and the scorer rebuilds the
very entry from them (entries hold tuples and other values that JSON would change).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vime_rollout.data.rows import fingerprint
from vime_rollout.errors import DataError
from vime_rollout.sample import Prompt

#: Key of ``Prompt.metadata`` that holds the recipe of the entry.
GYM_KEY = "gym"


def gym_dataset(task: str, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    """Return the reasoning-gym data set of a recipe (cached: building some takes a while).

    Raises:
        DataError: When reasoning-gym is not installed, does not know the task, or refuses an option.
    """
    return _build(task, seed, size, json.dumps(dict(options), sort_keys=True))


@lru_cache(maxsize=16)
def _build(task: str, seed: int, size: int, options: str) -> Any:
    try:
        import reasoning_gym  # optional dependency: the extra vime-rollout[reasoning-gym]
    except ModuleNotFoundError as error:
        raise DataError(
            "reasoning-gym is not installed", where=f"task {task}", fix="pip install 'vime-rollout[reasoning-gym]'"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(options))
    except (ValueError, TypeError, AssertionError) as error:  # its configurations check themselves with assert
        raise DataError("reasoning-gym refuses the task", where=f"task {task}", seen=f"{options}: {error}") from error


class GymData:
    """The prompts of one reasoning-gym task.

    Args:
        task: Name of the task, such as ``"chain_sum"``.
        seed: Seed of the generator.
        size: Number of entries.
        options: Further options of the task.

    Raises:
        DataError: When the task cannot be built or has no entries.
    """

    def __init__(self, task: str, *, seed: int, size: int, options: Mapping[str, Any] | None = None) -> None:
        """Build the task's data set."""
        if size < 1:
            raise DataError("data set is empty", where=f"task {task}", seen=f"size {size}", expected="at least 1")
        self.name = f"{task}-{seed}"
        self.recipe: dict[str, Any] = {"task": task, "seed": seed, "size": size, "options": dict(options or {})}
        self.fingerprint = fingerprint(json.dumps(self.recipe, sort_keys=True))
        self._size = size
        self._entries = gym_dataset(task, seed, size, self.recipe["options"])

    def __len__(self) -> int:
        """Number of prompts."""
        return self._size

    def __getitem__(self, row: int) -> Prompt:
        """Return the prompt of one entry."""
        entry = self._entries[row]
        metadata = {GYM_KEY: {**self.recipe, "index": row}}
        return Prompt(
            id=f"{self.name}:{row}", text=str(entry["question"]), label=str(entry["answer"]), metadata=metadata
        )
