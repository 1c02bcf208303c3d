"""What a user may write of their own: a reward, a filter, a generate function and a source of prompts.

They do what the built-in ones do, so that a run with them can be held against what is known of the task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vime_rollout import (
    DataConfig,
    Encoder,
    Prompt,
    Rollout,
    Sample,
    SampleGroup,
    Score,
    open_data_source,
    single_turn,
)


class Sums:
    """Prompts of a task, from a source that asks for the tokenizer."""

    def __init__(self, encoder: Encoder, *, seed: int = 3, size: int = 400) -> None:
        sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        data = DataConfig(
            gym_task="chain_sum", gym_seed=seed, gym_size=size, gym_options=sums, seed=seed, apply_chat_template=True
        )
        self._source = open_data_source(data, encoder)

    def next(self, n: int) -> list[Prompt]:
        return self._source.next(n)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["own"])


async def equals(sample: Sample, *, right: float) -> Score:
    """Score the answer that is the label, and say why another one is not."""
    if sample.response.strip() == sample.label:
        return Score(right)
    return Score(0.0, f"{sample.response!r} is not {sample.label!r}")


def has_answers(group: SampleGroup, *, least: int) -> str:
    """Keep groups in which something was said at all."""
    return "" if sum(sample.response_length for sample in group) >= least else "nothing was said"


async def noted(rollout: Rollout, prompt: Prompt, index: int, version: int | None, *, note: str) -> Sample:
    """Answer in one turn, and leave a note."""
    sample = await single_turn(rollout, prompt, index, version)
    return dataclasses.replace(sample, metadata={**sample.metadata, "note": note})
