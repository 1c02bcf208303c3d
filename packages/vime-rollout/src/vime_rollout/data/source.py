"""The data source: an endless, seeded, resumable walk over a finite set of prompts.

Epoch e visits all rows once, in the order ``shuffle(range(n), seed=f"{seed}:{e}")`` (or in file order). The order
depends on nothing but (n, seed, e), so a position is two integers, and restoring them continues the walk exactly. A
walk of n prompts never returns fewer than n: it crosses as many epoch borders as it takes.

With an encoder, prompts come with their token ids, and prompts longer than ``max_prompt_tokens`` are refused or dropped
and counted, as configured. Dropping happens in the walk, so the count is part of the position.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from vime_rollout.data.gym import GymData
from vime_rollout.data.jsonl import JsonlData
from vime_rollout.data.parquet import ParquetData
from vime_rollout.data.rows import RowKeys, as_chat
from vime_rollout.errors import DataError, StateError
from vime_rollout.sample import Prompt
from vime_rollout.tokens import Encoder


class PromptData(Protocol):
    """A finite, random-access set of prompts."""

    name: str
    fingerprint: str

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def __getitem__(self, row: int, /) -> Prompt:
        """Return the prompt of one row; equal for equal rows."""
        ...


class DataSource(Protocol):
    """What the pipeline asks of a source of prompts; write your own by dotted path."""

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that ``state_dict`` returned."""
        ...


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which prompts to read, and how. Set exactly one of ``path`` and ``gym_task``.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file.
        keys: Which keys of a row mean what.
        gym_task: Name of a reasoning-gym task.
        gym_seed: Seed of the task's generator.
        gym_size: Number of entries to generate.
        gym_options: Further options of the task.
        apply_chat_template: Turn plain strings into one user message, so that the chat template is applied to them.
        system_prompt: System message before each prompt; needs ``apply_chat_template``.
        shuffle: Shuffle each epoch; else file order.
        seed: Seed of the shuffle.
        max_prompt_tokens: Longest prompt that fits, in tokens; ``None`` means no bound is checked.
        overlong: What to do with a longer one: ``"error"`` names it, ``"drop"`` leaves it out and counts it.
    """

    path: str | None = None
    keys: RowKeys = field(default_factory=RowKeys)
    gym_task: str | None = None
    gym_seed: int = 0
    gym_size: int = 10_000
    gym_options: Mapping[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_prompt: str | None = None
    shuffle: bool = True
    seed: int = 0
    max_prompt_tokens: int | None = None
    overlong: Literal["error", "drop"] = "error"


class EpochSource:
    """Walks over a ``PromptData`` in epochs; see the module's docstring.

    Args:
        data: The prompts.
        shuffle: Shuffle each epoch.
        seed: Seed of the shuffle.
        form: Last change to a prompt before it is encoded, such as ``as_chat``.
        encoder: Makes token ids; without one, prompts come without tokens and no length is checked.
        max_prompt_tokens: Longest prompt allowed, in tokens.
        overlong: ``"error"`` or ``"drop"``.

    Raises:
        DataError: When there are no prompts.
    """

    def __init__(
        self,
        data: PromptData,
        *,
        shuffle: bool = True,
        seed: int = 0,
        form: Callable[[Prompt], Prompt] | None = None,
        encoder: Encoder | None = None,
        max_prompt_tokens: int | None = None,
        overlong: Literal["error", "drop"] = "error",
    ) -> None:
        """Start at the first prompt of epoch 0."""
        if len(data) == 0:
            raise DataError("data set is empty", where=data.name, expected="at least one prompt")
        self._data = data
        self._shuffle = shuffle
        self._seed = seed
        self._form = form
        self._encoder = encoder
        self._max_prompt_tokens = max_prompt_tokens
        self._overlong = overlong
        self._epoch = 0
        self._offset = 0
        self._served = 0
        self._dropped = 0
        self._barren = 0  # rows dropped since the last prompt was handed out
        self._order = self._permutation(0)

    def __len__(self) -> int:
        """Number of rows of one epoch, overlong ones included."""
        return len(self._data)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt (at a border: of the one before)."""
        return self._epoch

    @property
    def dropped(self) -> int:
        """Prompts left out so far because they were too long, counted again in each epoch."""
        return self._dropped

    def next(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts, across epoch borders where necessary.

        Raises:
            DataError: For a prompt that is too long, or when every prompt of the data set is.
        """
        prompts: list[Prompt] = []
        while len(prompts) < n:
            prompt = self._step()
            if prompt is not None:
                prompts.append(prompt)
        return prompts

    def _step(self) -> Prompt | None:
        if self._offset == len(self._order):
            self._epoch += 1
            self._offset = 0
            self._order = self._permutation(self._epoch)
        prompt = self._data[self._order[self._offset]]
        prompt = dataclasses.replace(prompt, position=self._served, epoch=self._epoch)
        prompt = prompt if self._form is None else self._form(prompt)
        if self._encoder is not None:
            prompt = self._encoder.encode(prompt)
            if self._too_long(prompt):
                self._offset += 1
                self._drop(prompt)
                return None
        self._offset += 1
        self._served += 1
        self._barren = 0
        return prompt

    def _too_long(self, prompt: Prompt) -> bool:
        limit = self._max_prompt_tokens
        if limit is None or len(prompt.tokens) <= limit:
            return False
        if self._overlong == "error":
            raise DataError(
                "prompt is longer than the context allows",
                where=f"prompt {prompt.id}",
                seen=f"{len(prompt.tokens)} tokens",
                expected=f"at most {limit}",
                fix='shorten it, raise the limit, or set overlong = "drop"',
            )
        return True

    def _drop(self, prompt: Prompt) -> None:
        self._dropped += 1
        self._barren += 1
        if self._barren >= len(self._data):
            raise DataError(
                "every prompt is longer than the context allows",
                where=self._data.name,
                seen=f"{self._barren} prompts dropped in a row, the last ({prompt.id}) of {len(prompt.tokens)} tokens",
                expected=f"at most {self._max_prompt_tokens}",
            )

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._data)))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order

    def _identity(self) -> dict[str, Any]:
        return {"data": self._data.fingerprint, "rows": len(self._data), "shuffle": self._shuffle, "seed": self._seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is a position in, as JSON values."""
        position = {"epoch": self._epoch, "offset": self._offset, "served": self._served}
        return {**self._identity(), **position, "dropped": self._dropped, "barren": self._barren}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            StateError: When the state was saved from other data, another seed or another order.
        """
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise StateError(
                    f"data position belongs to another data source ({name} differs)",
                    where=self._data.name,
                    seen=str(state.get(name)),
                    expected=str(expected),
                    fix="resume with the data configuration of the run",
                )
        self._epoch, self._offset, self._served = state["epoch"], state["offset"], state["served"]
        self._dropped, self._barren = state["dropped"], state["barren"]
        self._order = self._permutation(self._epoch)


def open_data(config: DataConfig) -> PromptData:
    """Open the prompts that ``config`` names.

    Raises:
        DataError: When not exactly one of ``path`` and ``gym_task`` is set, or the data cannot be read.
    """
    if (config.path is None) == (config.gym_task is None):
        raise DataError("data configuration is ambiguous", expected="exactly one of path and gym_task")
    if config.gym_task is not None:
        return GymData(config.gym_task, seed=config.gym_seed, size=config.gym_size, options=config.gym_options)
    path = Path(config.path or "")
    if path.suffix == ".jsonl":
        return JsonlData(path, config.keys)
    if path.suffix == ".parquet":
        return ParquetData(path, config.keys)
    raise DataError("unknown kind of data file", where=str(path), expected=".jsonl or .parquet")


def open_data_source(config: DataConfig, encoder: Encoder | None = None) -> EpochSource:
    """Open the prompts that ``config`` names and start a walk over them.

    Args:
        config: What to read.
        encoder: Makes token ids of prompts; needed for ``max_prompt_tokens``.

    Raises:
        DataError: When the data cannot be read, is empty, or a length bound is set without an encoder.
    """
    if config.max_prompt_tokens is not None and encoder is None:
        raise DataError("max_prompt_tokens needs an encoder", fix="pass the model's Encoder")
    if config.system_prompt is not None and not config.apply_chat_template:
        raise DataError("system_prompt needs apply_chat_template", seen=repr(config.system_prompt[:60]))
    return EpochSource(
        open_data(config),
        shuffle=config.shuffle,
        seed=config.seed,
        form=partial(as_chat, system_prompt=config.system_prompt) if config.apply_chat_template else None,
        encoder=encoder,
        max_prompt_tokens=config.max_prompt_tokens,
        overlong=config.overlong,
    )
