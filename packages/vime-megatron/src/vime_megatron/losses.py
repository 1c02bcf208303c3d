"""Supervised fine-tuning as a :data:`~vime_megatron.TokenLoss`; policy losses come from outside.

A loss sees one packed micro-batch at a time and must not depend on what else is in it, so it returns sums over tokens
whose weights the caller has normalised over the whole global batch. Suffix ``_t``: one value per trained token.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def sft_loss(logprobs_t: Tensor, entropy_t: Tensor, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood, weighted per token.

    Args:
        logprobs_t: Log-probability of each trained token, ``[t]``, nats.
        entropy_t: Entropy of each predicting distribution, ``[t]``, nats.
        fields: Holds ``weight`` ``[t]``: the loss mask divided by the global batch's number of trained tokens.

    Returns:
        The weighted sum of ``-logprobs_t``, and the metrics ``nll`` and ``entropy`` (means over the global batch when
        the weights sum to 1).
    """
    weight_t = fields["weight"]
    loss = -(weight_t * logprobs_t).sum()
    return loss, {"nll": loss.detach(), "entropy": (weight_t * entropy_t.detach()).sum()}
