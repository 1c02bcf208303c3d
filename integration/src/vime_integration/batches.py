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
from vime_grpo import BatchRow, BatchRows, RunConfig, build_batch, group_advantages, split_updates
from vime_megatron import TrainSequence
from vime_rollout import Sample

from vime_integration.staleness import ON_POLICY, check_lag, on_policy_field

#: Lengths of the rows, their tokens end to end, and each field likewise.
_Packed = tuple[list[int], Any, dict[str, Any]]


@dataclass(frozen=True)
class RolloutBatch:
    """What one rollout hands to the trainer ranks, through Ray's object store, as a few long arrays.

    Attributes:
        version: The version of the weights that train on it.
        updates: The rows of each optimiser step.
    """

    version: int
    updates: tuple[BatchRows, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as arrays, which Ray's store keeps beside the rest."""
        return _unpacked, (self.version, [_packed(rows) for rows in self.updates])


def _packed(rows: BatchRows) -> _Packed:
    return rows.lengths, rows.tokens.numpy(), {name: values_t.numpy() for name, values_t in rows.fields.items()}


def _unpacked(version: int, updates: Sequence[_Packed]) -> RolloutBatch:
    # Arrays out of Ray's store cannot be written to, and torch takes none of those.
    return RolloutBatch(
        version,
        tuple(
            BatchRows(
                lengths,
                torch.from_numpy(tokens.copy()),
                {name: torch.from_numpy(values.copy()) for name, values in fields.items()},
            )
            for lengths, tokens, fields in updates
        ),
    )


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
    advantages_b = group_advantages(
        rewards, groups, estimator=algorithm.advantage, normalize_std=algorithm.normalize_std
    )
    updates = []
    for positions in split_updates(groups, algorithm.steps_per_rollout):
        chosen = [samples[position] for position in positions]
        fresh = [on_policy_field(sample, version) for sample in chosen] if max_lag else []
        masked = [field[s.prompt_length :].int().tolist() for field, s in zip(fresh, chosen, strict=False)]
        rows = build_batch(
            chosen,
            advantages_b[positions],
            aggregation=algorithm.loss_aggregation,
            horizon=config.rollout.max_response_tokens,
            on_policy=masked if max_lag and config.rollout.mask_off_policy else None,
        )
        updates.append(rows.with_fields(**{ON_POLICY: fresh}) if max_lag else rows)
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
