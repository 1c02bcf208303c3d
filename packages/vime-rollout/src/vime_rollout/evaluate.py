"""Evaluation: the same engines, encoder and reward, other prompts and sampling, and no trace in the training's state.

Evaluation prompts come from a source of their own, in file order, so the training's position does not move; their group
ids are those of ``EVALUATION_EPOCH``, so neither seeds nor request names can be those of a training sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vime_rollout.data.source import DataConfig, open_data_source
from vime_rollout.engine.request import SamplingParams
from vime_rollout.rollout import Rollout
from vime_rollout.sample import Prompt, SampleGroup
from vime_rollout.tokens import Encoder

#: The epoch of a prompt that is evaluated: no pass over training data has it.
EVALUATION_EPOCH = -1


def evaluation_prompts(config: DataConfig, encoder: Encoder | None = None, *, most: int | None = None) -> list[Prompt]:
    """Return the prompts of a data set once each, in file order.

    Args:
        config: What to read; its ``shuffle`` and ``seed`` are not used.
        encoder: As for ``open_data_source``.
        most: At most so many; ``None`` takes all (prompts that are too long are dropped as configured).

    Raises:
        DataError: When they cannot be read.
    """
    source = open_data_source(dataclasses.replace(config, shuffle=False), encoder)
    prompts: list[Prompt] = []
    while len(prompts) < (len(source) if most is None else min(most, len(source))):
        (prompt,) = source.next(1)
        if prompt.epoch > 0:
            break  # so many were dropped
        prompts.append(prompt)
    return prompts


async def evaluate(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int | None = None,
    sampling: SamplingParams | None = None,
    version: int | None = None,
) -> list[SampleGroup]:
    """Answer and score prompts without touching anything that training goes on from.

    Args:
        rollout: The training's rollout: its engine, encoder, reward and generate function are used.
        prompts: Distinct prompts.
        samples_per_prompt: Answers to each; ``None`` takes the training's.
        sampling: How they are sampled, such as ``temperature=0``; ``None`` takes the training's.
        version: As for ``Rollout.run``.

    Returns:
        The scored groups, in the order of the prompts; the group ids are those of ``EVALUATION_EPOCH``.

    Raises:
        RolloutError: As for ``Rollout.run``.
    """
    config = dataclasses.replace(
        rollout.config,
        samples_per_prompt=rollout.config.samples_per_prompt if samples_per_prompt is None else samples_per_prompt,
        sampling=sampling or rollout.config.sampling,
    )
    questions = [dataclasses.replace(prompt, epoch=EVALUATION_EPOCH) for prompt in prompts]
    return await rollout.with_config(config).run(questions, version=version)
