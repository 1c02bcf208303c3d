r"""Corrections for samples that another policy drew than the one the trainer computes.

Three policies meet in a step, and they are kept apart:

=========== ==================== ==================================================================================
behaviour   ``rollout_logprob``  sampled the tokens: the engine, whose kernels round differently, and in an
                                 asynchronous run weights that are some versions old
proximal    ``old_logprob``      the trainer before the rollout's first update: what the objective's clip is around
current     (with gradient)      what is trained
=========== ==================== ==================================================================================

The objective is that of *decoupled* PPO: ``rho * objective(current / proximal)`` with ``rho = proximal / behaviour`` as
the importance weight of what was sampled. The clip then bounds how far one rollout moves the policy, however stale the
samples are, and ``rho`` alone repairs that they are from another distribution. Unbounded, ``rho`` is unbiased and its
variance has no bound; each correction here bounds it in its own way:

========= ======================================= ================================================================
name      factor                                  what it trades
========= ======================================= ================================================================
none      1                                       biased by the whole difference
decoupled ``rho``                                 unbiased, variance without bound
tis       ``rho`` cut to [low, high]              biased where it is cut, keeps every token
mis       ``rho``, or 0 above high                drops what the behaviour policy held for far too unlikely
icepop    ``rho``, or 0 outside [low, high]       drops on both sides
========= ======================================= ================================================================

Level. ``rho`` is a token's (``token``); or its sequence's product, the exact weight of a whole response (``sequence``);
or the product's geometric mean, which does not shrink or grow with the length (``geometric``). At the last two a
correction keeps, cuts or drops a sequence as one.

Only the gradient's weight changes: denominators stay those of the whole batch, so dropping tokens does not make the
others count more. On policy every ratio is 1 and every correction is the identity.

Shapes: ``t`` tokens, flat over a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vime_grpo.errors import BatchError, ConfigError
from vime_grpo.kl import LOG_RATIO_CLAMP
from vime_grpo.registry import Registry, check_choice
from vime_grpo.segments import Segments

Correction = Callable[[Tensor, float, float], Tensor]
"""``(ratio [t], low, high)`` -> factor per token ``[t]``."""

CORRECTIONS: Registry[Correction] = Registry("correction")

Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


@CORRECTIONS.register("none", paper="no correction")
def no_correction(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return 1 for every token."""
    return torch.ones_like(ratio_t)


@CORRECTIONS.register(
    "decoupled",
    paper="Batch size-invariance for policy optimization, arXiv:2110.00641; for asynchronous RL: AReaL, "
    "arXiv:2505.24298",
)
def unbounded(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio as it is."""
    return ratio_t


@CORRECTIONS.register(
    "tis",
    paper="Truncated Importance Sampling, E. Ionides, 2008; in RL: IMPALA, arXiv:1802.01561; for engine mismatch: "
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, F. Yao et al., 2025 (blog)",
)
def truncated(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio, cut to [low, high]."""
    return ratio_t.clamp(low, high)


@CORRECTIONS.register(
    "mis",
    paper="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, J. Liu, Y. Li "
    "et al., 2025 (blog)",
)
def masked_above(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio up to high and 0 above."""
    return torch.where(ratio_t <= high, ratio_t, torch.zeros_like(ratio_t))


@CORRECTIONS.register("icepop", paper="Every Step Evolves (Ring-1T), arXiv:2510.18855")
def banded(ratio_t: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio within [low, high] and 0 outside."""
    return torch.where((ratio_t >= low) & (ratio_t <= high), ratio_t, torch.zeros_like(ratio_t))


def check_level(level: str, allowed: Sequence[str] = LEVELS) -> None:
    """Refuse an unknown level of a ratio.

    Raises:
        ConfigError: It is not allowed.
    """
    check_choice("level of a ratio", level, allowed)


def check_bounds(low: float, high: float) -> None:
    """Refuse bounds that leave the ratio of samples on policy out.

    Raises:
        ConfigError: 1 is not between them: a correction would cut or drop what needs none.
    """
    if not low <= 1 <= high:
        raise ConfigError(
            "a correction must leave samples on policy as they are",
            seen=f"bounds {low} and {high} of the ratio",
            expected="1, the ratio on policy, between them",
        )


def importance_ratio(
    old_logprobs_t: Tensor, rollout_logprobs_t: Tensor, *, level: str = "token", segments: Segments | None = None
) -> Tensor:
    """Return ``p_proximal / p_behaviour`` at each token.

    Args:
        old_logprobs_t: The trainer's logprobs before the update ``[t]``, nats.
        rollout_logprobs_t: The logprobs of the policy that sampled ``[t]``, nats.
        level: ``token``: of the token alone. ``sequence``: the product over the token's sequence. ``geometric``: the
            product's geometric mean, as GSPO (arXiv:2507.18071) takes ratios.
        segments: The sequences; needed above the level of tokens.

    Returns:
        The ratio ``[t]``, without gradient, finite: its logarithm is cut at ±20.

    Raises:
        BatchError: The level needs sequences and there are none.
    """
    log_ratio_t = (old_logprobs_t - rollout_logprobs_t).detach()
    if level != "token":
        if segments is None:
            raise BatchError("a ratio of sequences needs the sequences", seen=f"level {level!r} without segments")
        log_ratio_t = segments.sum(log_ratio_t) if level == "sequence" else segments.mean(log_ratio_t)
    return log_ratio_t.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
