"""Training metrics by the names that the field uses, each computed in one place.

Functions take what a step produced and return flat ``{name: float}``; nothing is logged here. Metrics of generation
(``rollout/raw_reward``, ``perf/tokens_per_gpu_per_sec``, ...) are made where samples are made, by vime-rollout.

==================================== =================================================================================
name                                 value
==================================== =================================================================================
rollout/advantages                   mean over samples of the mean over a sample's trained tokens, as the next three
rollout/log_probs                    the trainer's logprobs before the update, nats
rollout/rollout_log_probs            the engine's logprobs, nats
rollout/ref_log_probs                the reference model's logprobs, nats
rollout/logprob_abs_diff_max         largest ``|trainer's - engine's logprob|`` of a trained token, nats
train/loss, grad_norm, lr-pg_0       of an optimiser step
train/pg_loss                        the policy term of the loss, in the loss's scale
train/pg_clipfrac                    share of tokens on which the clip acts
train/ppo_kl                         mean ``old - new`` logprob: how far the policy moved within the rollout
train/entropy_loss                   mean entropy, nats
train/kl_loss                        mean KL penalty, before its coefficient
train/tis, tis_abs                   mean of the correction's ratio trainer / sampler, and of its distance from 1
train/tis_clipfrac, tis_maskfrac     share of tokens on which the correction acted, and on which it gave 0
train/train_rollout_logprob_abs_diff mean ``|trainer's logprob - engine's logprob|``, nats
==================================== =================================================================================

Means under ``train/`` are over the trained tokens of the global batch, weighted as the loss is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from vime_grpo.batch import BatchRow, BatchRows
from vime_grpo.errors import BatchError

_ROW_METRICS = {
    "advantage": "rollout/advantages",
    "rollout_logprob": "rollout/rollout_log_probs",
    "old_logprob": "rollout/log_probs",
    "ref_logprob": "rollout/ref_log_probs",
}


def batch_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return per-sample means of a batch's fields over its trained tokens.

    Args:
        rows: The rows of a rollout.

    Returns:
        ``rollout/advantages``, ``rollout/rollout_log_probs`` and, where the fields exist, ``rollout/log_probs`` and
        ``rollout/ref_log_probs``; and between trainer and engine, where the trainer's logprobs are known before the
        update, ``rollout/logprob_abs_diff_max``.
    """
    metrics: dict[str, float] = {}
    for field, name in _ROW_METRICS.items():
        laid = _having(rows, field, "weight")
        if laid and (mean := _mean_of_means(laid, field)) is not None:
            metrics[name] = mean
    if "rollout/log_probs" in metrics:
        fields = _having(rows, "old_logprob", "rollout_logprob", "weight").fields
        apart_t = fields["old_logprob"] - fields["rollout_logprob"]
        metrics["rollout/logprob_abs_diff_max"] = apart_t[fields["weight"] != 0].abs().max().item()
    return metrics


def _having(rows: Sequence[BatchRow], field: str, *more: str) -> BatchRows:
    """Return the rows that have a field, end to end, with no less than that field and some more."""
    if isinstance(rows, BatchRows):
        return rows if field in rows.fields else BatchRows.of([])
    names = (field, *more)
    return BatchRows.of(
        [BatchRow(row.tokens, {name: row.fields[name] for name in names}) for row in rows if field in row.fields]
    )


def _mean_of_means(rows: BatchRows, field: str) -> float | None:
    """Return the mean over rows of the mean over a row's trained tokens; None without any."""
    row_t = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows.lengths))
    trained_t = (rows.fields["weight"] != 0).double()
    sums_b = torch.zeros(len(rows), dtype=torch.float64)
    counts_b = sums_b.index_add(0, row_t, trained_t)
    sums_b.index_add_(0, row_t, torch.where(trained_t > 0, rows.fields[field], 0.0).double())
    some_b = counts_b > 0
    return (sums_b[some_b] / counts_b[some_b]).mean().item() if bool(some_b.any()) else None


def train_metrics(sums: Mapping[str, float], *, loss: float, grad_norm: float, lr: float) -> dict[str, float]:
    """Return the metrics of one optimiser step.

    Args:
        sums: What :class:`vime_grpo.losses.PolicyLoss` returned, added over micro-batches and ranks.
        loss: The loss, added likewise.
        grad_norm: Norm of the gradient before clipping.
        lr: Learning rate of the step.

    Returns:
        Names under ``train/``.

    Raises:
        BatchError: The sums hold no weight: they are not those of a policy loss.
    """
    weight = sums.get("weight_sum", 0.0)
    if weight <= 0:
        raise BatchError(
            "sums without weight", seen=str(dict(sums)), expected="weight_sum above 0, as PolicyLoss gives"
        )
    metrics = {f"train/{name}": float(value) / weight for name, value in sums.items() if name != "weight_sum"}
    if "pg_loss" in sums:
        # A loss is in the loss's own scale, which under the aggregation "horizon" is no mean over tokens.
        metrics["train/pg_loss"] = float(sums["pg_loss"])
    return metrics | {"train/loss": loss, "train/grad_norm": grad_norm, "train/lr-pg_0": lr}


def mean_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of several optimiser steps of one rollout; a name is averaged over the steps that have it.

    Args:
        steps: Metrics of each step.

    Returns:
        One value per name.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}
