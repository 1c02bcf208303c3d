"""Corrections for the difference between the policy that sampled and the policy that the trainer computes.

Engine and trainer hold the same weights, but their kernels round differently, so tokens come from a slightly other
distribution than the trainer believes. The ratio ``trainer / engine`` of a token's probabilities is its importance
weight; unbounded it has unbounded variance, so it is truncated (TIS), or tokens where it leaves a band are dropped
(IcePop). Only the gradient's weight changes: denominators stay those of the whole batch, so dropping tokens does not
make the others count more.

Shapes: ``t`` tokens, flat over a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vime_grpo.kl import LOG_RATIO_CLAMP
from vime_grpo.registry import Registry

Correction = Callable[[Tensor, float, float], Tensor]
"""``(ratio [t], low, high)`` -> factor per token ``[t]``."""

CORRECTIONS: Registry[Correction] = Registry("correction")


@CORRECTIONS.register("none", paper="no correction")
def no_correction(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return 1 for every token."""
    return torch.ones_like(ratio_t)


@CORRECTIONS.register(
    "tis", paper="Truncated Importance Sampling, E. Ionides, 2008; for engine mismatch: F. Yao et al., 2025 (blog)"
)
def truncated(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio, cut to [low, high]."""
    return ratio_t.clamp(low, high)


@CORRECTIONS.register("icepop", paper="Every Step Evolves (Ring-1T), arXiv:2510.18855")
def banded(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio within [low, high] and 0 outside."""
    return torch.where((ratio_t >= low) & (ratio_t <= high), ratio_t, torch.zeros_like(ratio_t))


def mismatch_ratio(old_logprobs_t: Tensor, rollout_logprobs_t: Tensor) -> Tensor:
    """Return ``p_trainer / p_engine`` of each token.

    Args:
        old_logprobs_t: The trainer's logprobs before the update ``[t]``, nats.
        rollout_logprobs_t: The engine's logprobs ``[t]``, nats.

    Returns:
        The ratio ``[t]``, without gradient, finite.
    """
    return (old_logprobs_t - rollout_logprobs_t).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
