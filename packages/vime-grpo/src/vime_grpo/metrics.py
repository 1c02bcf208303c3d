"""Metrics by the names that the field uses, each computed in one place.

Functions take what a step produced and return flat ``{name: float}``; nothing is logged here. Means over tokens are
first taken within a sample and then over samples ("per-sample mean"), except under ``train/``, where they are weighted
as the loss is.

==================================== =================================================================================
name                                 value
==================================== =================================================================================
rollout/raw_reward                   mean score of all samples, before any normalisation
rollout/response_len/*               mean, median, max, min of the trained tokens of a sample (the loss mask's sum)
rollout/total_lengths                mean length of prompt and response
rollout/truncated_ratio              share of samples that the token budget ended
rollout/repetition_frac              share of samples whose last 10 000 characters compress more than tenfold
rollout/zero_std/count_R             groups whose rewards are all equal to R (rounded to one decimal)
rollout/zero_std/ratio               share of groups whose rewards are all equal: they teach nothing
perf/tokens_per_gpu_per_sec          response tokens / rollout seconds / generating devices
perf/effective_tokens_per_gpu_per_sec  the same of trained tokens
perf/longest_sample_tokens_per_sec   longest response / rollout seconds: what bounds a synchronous rollout
rollout/advantages, log_probs, ...   per-sample means over trained tokens
train/loss, grad_norm, lr-pg_0       of an optimiser step
train/pg_loss, pg_clipfrac, ...      weighted means over its global batch
train/train_rollout_logprob_abs_diff mean ``|trainer's logprob - engine's logprob|``, nats
==================================== =================================================================================

Shapes: ``S`` tokens of a sequence.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vime_grpo.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from vime_grpo.batch import BatchRow

REPETITION_WINDOW = 10_000
REPETITION_RATIO = 10.0

_ROW_METRICS = {
    "advantage": "rollout/advantages",
    "rollout_logprob": "rollout/rollout_log_probs",
    "old_logprob": "rollout/log_probs",
    "ref_logprob": "rollout/ref_log_probs",
}


class RolledSample(Protocol):
    """What rollout metrics read of a sample; vime-rollout's ``Sample`` fits as it is."""

    @property
    def group_id(self) -> str:
        """Identity of the group."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and response, ids."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""

    @property
    def loss_mask(self) -> Sequence[int]:
        """0 or 1 per response token."""

    @property
    def reward(self) -> float | None:
        """The score."""

    @property
    def status(self) -> str:
        """How generation ended: ``completed``, ``truncated`` or ``aborted``."""

    @property
    def response(self) -> str:
        """The response as text."""


def rollout_metrics(samples: Sequence[RolledSample], *, seconds: float, devices: int) -> dict[str, float]:
    """Return the metrics of one rollout.

    Args:
        samples: All scored samples of the step.
        seconds: Wall time of generation and scoring.
        devices: Devices that generated; on a CPU, engines.

    Returns:
        Names under ``rollout/`` and ``perf/``.

    Raises:
        BatchError: There is no sample, one has no reward, or time or devices are not positive.
    """
    if not samples or seconds <= 0 or devices < 1:
        seen = f"{len(samples)} samples, {seconds} s, {devices} devices"
        raise BatchError("no rollout to measure", seen=seen, expected="at least one sample, device and moment")
    unscored = next((sample for sample in samples if sample.reward is None), None)
    if unscored is not None:
        raise BatchError("a sample has no reward", where=f"group {unscored.group_id!r}", fix="score before measuring")
    rewards = [float(sample.reward) for sample in samples if sample.reward is not None]
    trained = [sum(sample.loss_mask) for sample in samples]
    responses = [len(sample.tokens) - sample.prompt_length for sample in samples]
    metrics = {
        "rollout/raw_reward": statistics.fmean(rewards),
        "rollout/response_len/mean": statistics.fmean(trained),
        "rollout/response_len/median": float(statistics.median(trained)),
        "rollout/response_len/max": float(max(trained)),
        "rollout/response_len/min": float(min(trained)),
        "rollout/response_lengths": statistics.fmean(responses),
        "rollout/total_lengths": statistics.fmean(len(sample.tokens) for sample in samples),
        "rollout/truncated_ratio": statistics.fmean(sample.status == "truncated" for sample in samples),
        "rollout/repetition_frac": statistics.fmean(is_repetitive(sample.response) for sample in samples),
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(responses) / seconds / devices,
        "perf/effective_tokens_per_gpu_per_sec": sum(trained) / seconds / devices,
        "perf/longest_sample_tokens_per_sec": max(responses) / seconds,
    }
    return metrics | zero_std_metrics(rewards, [sample.group_id for sample in samples])


def zero_std_metrics(rewards: Sequence[float], group_ids: Sequence[str]) -> dict[str, float]:
    """Count the groups whose rewards are all equal, by that reward, and give their share of all groups.

    Args:
        rewards: One per sample.
        group_ids: One per sample, in any order.

    Returns:
        ``rollout/zero_std/count_R`` for each R that occurs, and ``rollout/zero_std/ratio``.
    """
    groups: dict[str, set[float]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        groups.setdefault(group, set()).add(reward)
    counts: dict[str, float] = {}
    for values in groups.values():
        if len(values) == 1:
            name = f"rollout/zero_std/count_{round(next(iter(values)), 1)}"
            counts[name] = counts.get(name, 0.0) + 1
    return counts | {"rollout/zero_std/ratio": sum(counts.values()) / len(groups)}


def is_repetitive(text: str) -> bool:
    """Return whether the end of a text repeats itself: its last 10 000 characters compress more than tenfold."""
    tail = text[-REPETITION_WINDOW:].encode()
    # zlib's header and the shortest possible match make short texts incompressible, so they never count.
    return bool(tail) and len(tail) / len(zlib.compress(tail)) > REPETITION_RATIO


def batch_metrics(rows: Sequence[BatchRow]) -> dict[str, float]:
    """Return per-sample means of a batch's fields over its trained tokens.

    Args:
        rows: The rows of a rollout.

    Returns:
        ``rollout/advantages``, ``rollout/rollout_log_probs`` and, where the fields exist, ``rollout/log_probs`` and
        ``rollout/ref_log_probs``; and between trainer and engine, where the trainer's logprobs are known before the
        update, ``rollout/logprob_abs_diff_max``.
    """
    means: dict[str, list[float]] = {}
    largest = 0.0
    for row in rows:
        trained_s = row.fields["weight"] != 0
        if not bool(trained_s.any()):
            continue
        for field, name in _ROW_METRICS.items():
            if field in row.fields:
                means.setdefault(name, []).append(row.fields[field][trained_s].mean().item())
        if "old_logprob" in row.fields:
            difference_s = (row.fields["old_logprob"] - row.fields["rollout_logprob"])[trained_s].abs()
            largest = max(largest, difference_s.max().item())
    metrics = {name: statistics.fmean(values) for name, values in means.items()}
    return metrics | ({"rollout/logprob_abs_diff_max": largest} if "rollout/log_probs" in metrics else {})


def logprob_abs_diff(rows: Sequence[BatchRow]) -> float:
    """Return ``train/train_rollout_logprob_abs_diff`` before an update, for a guard.

    Args:
        rows: Rows of one global batch with ``old_logprob``.

    Returns:
        ``|old_logprob - rollout_logprob|`` in nats, averaged with the loss's weights over all rows.

    Raises:
        BatchError: A row has no ``old_logprob``.
    """
    total, weight = 0.0, 0.0
    for row in rows:
        if "old_logprob" not in row.fields:
            raise BatchError("rows lack old_logprob", fix="hand old_logprobs to build_batch")
        weight_s = row.fields["weight"].double()
        trained_s = weight_s != 0
        difference_s: Tensor = (row.fields["old_logprob"] - row.fields["rollout_logprob"]).double().abs()
        total += (difference_s[trained_s] * weight_s[trained_s]).sum().item()
        weight += weight_s.sum().item()
    return total / weight


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
