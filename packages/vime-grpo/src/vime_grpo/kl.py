r"""Estimators of the KL divergence from one sampled token, and what their gradients pull towards.

With samples from the policy :math:`\pi` and :math:`\Delta = \log\pi - \log\pi_{ref}`:

========== =============================== ========================== ================================================
name       value                           as an estimate of KL(π‖ref) expected gradient when used as a loss
========== =============================== ========================== ================================================
k1         Δ                               unbiased, may be negative   zero: it constrains nothing by itself
k2         Δ² / 2                          biased, low variance        that of KL(π‖ref)
k3         exp(-Δ) - 1 + Δ                 unbiased, never negative    that of KL(ref‖π)
low_var_kl k3, clamped                     as k3 within ±10            as k3 within the clamp, else 0
========== =============================== ========================== ================================================

The gradients follow from :math:`E_\pi[\nabla\log\pi] = 0`. k3 grows like :math:`e^{-\Delta}` where the reference holds
a token for far likelier than the policy does, so one token can rule a step: hence the clamped form.

Shapes: ``t`` tokens, flat over a micro-batch. Units: nats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vime_grpo.registry import Registry

#: Largest absolute value of the clamped estimator, in nats.
KL_CLAMP = 10.0

#: Log ratios are cut here before exponentiation: exp(20) is beyond every clip bound, and finite also in its gradient.
LOG_RATIO_CLAMP = 20.0

KlEstimator = Callable[[Tensor], Tensor]
"""``log(pi / pi_ref)`` per token ``[t]`` -> KL per token ``[t]``."""

KL_KINDS: Registry[KlEstimator] = Registry("KL estimator")

_SCHULMAN = "Approximating KL Divergence, J. Schulman, 2020 (joschu.net/blog/kl-approx.html)"


@KL_KINDS.register("k1", paper=_SCHULMAN)
def k1(log_ratio_t: Tensor) -> Tensor:
    """Return ``Δ``."""
    return log_ratio_t


@KL_KINDS.register("k2", paper=_SCHULMAN)
def k2(log_ratio_t: Tensor) -> Tensor:
    """Return ``Δ² / 2``."""
    return 0.5 * log_ratio_t.square()


@KL_KINDS.register("k3", paper=_SCHULMAN)
def k3(log_ratio_t: Tensor) -> Tensor:
    """Return ``exp(-Δ) - 1 + Δ``; ``expm1`` keeps it exact, and not negative, near 0."""
    return torch.expm1(-log_ratio_t) + log_ratio_t


@KL_KINDS.register("low_var_kl", paper=f"{_SCHULMAN}; clamped as in GRPO implementations")
def low_var_kl(log_ratio_t: Tensor) -> Tensor:
    """Return k3 with its argument cut at ±20 and its value at ±10."""
    return k3(log_ratio_t.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).clamp(-KL_CLAMP, KL_CLAMP)


def kl_penalty(logprobs_t: Tensor, target_logprobs_t: Tensor, kind: str) -> Tensor:
    """Return the KL penalty of each token.

    Args:
        logprobs_t: Logprobs of the policy in training ``[t]``, with gradient.
        target_logprobs_t: Logprobs of the policy to stay near ``[t]``.
        kind: Name in the registry.

    Returns:
        Penalty per token ``[t]``, nats.

    Raises:
        ConfigError: There is no such estimator.
    """
    return KL_KINDS.get(kind)(logprobs_t - target_logprobs_t)
