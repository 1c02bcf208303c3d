"""Metrics of a batch of scored groups, under the names that dashboards of this family of trainers know.

| name | value |
|---|---|
| ``rollout/raw_reward`` | mean reward over samples, before any normalisation |
| ``rollout/response_len/{mean,median,max,min}`` | trained tokens of a response |
| ``rollout/response_lengths``, ``rollout/total_lengths`` | mean tokens of a response, and with its prompt |
| ``rollout/truncated_ratio`` | share of samples that the token budget ended |
| ``rollout/zero_std/ratio``, ``rollout/zero_std/count_{r}`` | groups whose rewards are all equal (to r): no gradient |
| ``rollout/repetition_frac`` | share of responses whose last 10,000 characters compress more than tenfold |
| ``rollout/reward_timeout_ratio`` | share of samples whose reward timed out |
| ``rollout/version/{min,max}`` | oldest and newest weights behind any token |
| ``perf/rollout_time`` | seconds |
| ``perf/tokens_per_gpu_per_sec`` | response tokens / seconds / engine devices |
| ``perf/effective_tokens_per_gpu_per_sec`` | trained tokens / seconds / engine devices |
| ``perf/longest_sample_tokens_per_sec`` | longest response / seconds |
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from vime_rollout.errors import SampleError
from vime_rollout.rewards.base import TIMEOUT_REASON
from vime_rollout.sample import Sample, SampleGroup, SampleStatus

_REPETITION_CHARS = 10_000
_REPETITION_RATIO = 10.0


def rollout_metrics(groups: Sequence[SampleGroup], *, seconds: float, devices: int = 1) -> dict[str, float]:
    """Return the metrics of one rollout step.

    Args:
        groups: Scored, at least one.
        seconds: Wall time of the step.
        devices: Devices of all engines together.

    Raises:
        SampleError: When there is no group, or one is not scored.
    """
    if not groups:
        raise SampleError("no groups to make metrics of", expected="at least one scored group")
    samples = [sample for group in groups for sample in group]
    lengths = [sample.trained_tokens for sample in samples]
    responses = [sample.response_length for sample in samples]
    rewards = [reward for group in groups for reward in group.rewards]
    metrics = {
        "rollout/raw_reward": fmean(rewards),
        "rollout/response_len/mean": fmean(lengths),
        "rollout/response_len/median": float(median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/response_lengths": fmean(responses),
        "rollout/total_lengths": fmean(len(s.tokens) for s in samples),
        "rollout/truncated_ratio": fmean(s.status is SampleStatus.TRUNCATED for s in samples),
        "rollout/repetition_frac": fmean(_repeats(s.response) for s in samples),
        "rollout/reward_timeout_ratio": fmean(s.reward_reason.startswith(TIMEOUT_REASON) for s in samples),
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(responses) / seconds / devices,
        "perf/effective_tokens_per_gpu_per_sec": sum(lengths) / seconds / devices,
        "perf/longest_sample_tokens_per_sec": max(responses) / seconds,
    }
    return metrics | _equal_groups(groups) | _versions(samples)


def _equal_groups(groups: Sequence[SampleGroup]) -> dict[str, float]:
    equal = Counter(group.rewards[0] for group in groups if len(set(group.rewards)) == 1)
    counts = {f"rollout/zero_std/count_{reward:g}": float(count) for reward, count in sorted(equal.items())}
    return {"rollout/zero_std/ratio": sum(equal.values()) / len(groups), **counts}


def _versions(samples: Sequence[Sample]) -> dict[str, float]:
    versions = [span.version for sample in samples for span in sample.versions]
    if not versions:
        return {}
    return {"rollout/version/min": float(min(versions)), "rollout/version/max": float(max(versions))}


def _repeats(text: str) -> bool:
    tail = text[-_REPETITION_CHARS:].encode()
    # Short texts never compress tenfold, whatever they say.
    return len(tail) > 0 and len(tail) / len(zlib.compress(tail)) > _REPETITION_RATIO


def zero_reasons(groups: Sequence[SampleGroup], *, most: int = 3) -> list[tuple[str, int]]:
    """Return the most frequent reasons of scores of 0: they tell a weak policy from a broken verifier."""
    reasons = Counter(s.reward_reason for group in groups for s in group if s.reward == 0)
    return reasons.most_common(most)
