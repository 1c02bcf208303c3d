"""Samples become training sequences: the joint between vime-rollout, vime-grpo and vime-megatron.

The three packages do not know each other. A ``Sample`` fits vime-grpo's ``SampleLike`` by shape; a ``BatchRow`` holds
what a ``TrainSequence`` needs. One rollout becomes one or more *updates*, each the global batch of an optimiser step,
normalised on its own, and never cutting a group in two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vime_grpo import BatchRow, RunConfig, build_batch, group_advantages, split_updates
from vime_megatron import TrainSequence
from vime_rollout import Sample

from vime_integration.staleness import ON_POLICY, check_lag, on_policy_field

#: Lengths of the rows, their tokens end to end, and each field likewise.
_Packed = tuple[list[int], Any, dict[str, Any]]


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout hands to the trainer ranks, through Ray's object store.

    It travels as a few long arrays: thousands of short tensors, each packed and unpacked by itself and twice on their
    way, take longer than the training of a small model.

    Attributes:
        version: The version of the weights that train on it.
        updates: One list of rows an optimiser step.
    """

    version: int
    updates: tuple[tuple[BatchRow, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel packed."""
        return _unpacked, (self.version, [_packed(rows) for rows in self.updates])


def _packed(rows: Sequence[BatchRow]) -> _Packed:
    """Lay the rows end to end; they have the same fields, as the trainer asks of a batch."""
    names = list(rows[0].fields) if rows else []
    return (
        [len(row.tokens) for row in rows],
        torch.cat([row.tokens for row in rows]).numpy() if rows else None,
        {name: torch.cat([row.fields[name] for row in rows]).numpy() for name in names},
    )


def _unpacked(version: int, updates: Sequence[_Packed]) -> RolloutBatch:
    restored: list[tuple[BatchRow, ...]] = []
    for lengths, tokens, fields in updates:
        if tokens is None:
            restored.append(())
            continue
        # Arrays out of Ray's store cannot be written to, and torch takes none of those.
        parts = {name: torch.split(torch.from_numpy(values.copy()), lengths) for name, values in fields.items()}
        pieces = torch.split(torch.from_numpy(tokens.copy()), lengths)
        rows = (BatchRow(piece, {name: part[i] for name, part in parts.items()}) for i, piece in enumerate(pieces))
        restored.append(tuple(rows))
    return RolloutBatch(version, tuple(restored))


def make_batch(samples: Sequence[Sample], config: RunConfig, version: int, *, max_lag: int = 0) -> RolloutBatch:
    """Turn the scored samples of one rollout into the rows of its optimiser steps.

    Args:
        samples: Every sample of the rollout, scored, in any order.
        config: The run's configuration.
        version: The version of the weights that will train on them.
        max_lag: How many versions older a token may be.

    Raises:
        PipelineError: A sample was made under another version, or is not scored.
        BatchError: The samples cannot make a batch.
    """
    check_lag(samples, version, max_lag)
    algorithm = config.algorithm
    groups = [sample.group_id for sample in samples]
    rewards = [float(sample.reward or 0.0) for sample in samples]
    advantages = group_advantages(rewards, groups, estimator=algorithm.advantage, normalize_std=algorithm.normalize_std)
    updates = []
    for positions in split_updates(groups, algorithm.steps_per_rollout):
        chosen = [samples[position] for position in positions]
        fresh = [on_policy_field(sample, version) for sample in chosen] if max_lag else []
        masked = [field[s.prompt_length :].int().tolist() for field, s in zip(fresh, chosen, strict=False)]
        rows = build_batch(
            chosen,
            [float(advantages[position]) for position in positions],
            aggregation=algorithm.loss_aggregation,
            horizon=config.rollout.max_response_tokens,
            on_policy=masked if max_lag and config.rollout.mask_off_policy else None,
        )
        for row, field in zip(rows, fresh, strict=False):
            row.fields[ON_POLICY] = field
        updates.append(tuple(rows))
    return RolloutBatch(version, tuple(updates))


def sequences_of(rows: Sequence[BatchRow], **more: Mapping[int, Tensor]) -> list[TrainSequence]:
    """Return the rows as the trainer takes them, with further per-token fields.

    Args:
        rows: The global batch of one optimiser step.
        more: Field name -> values ``[S]`` by position. A rank has them for its own share only; the other sequences get
            zeros, which no one reads, because a rank trains on its own share alone.
    """
    sequences = []
    for position, row in enumerate(rows):
        fields = dict(row.fields)
        for name, values in more.items():
            fields[name] = values[position] if position in values else torch.zeros(len(row.tokens))
        sequences.append(TrainSequence(row.tokens, fields))
    return sequences
