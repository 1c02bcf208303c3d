"""Log-probabilities and entropies over a vocabulary split over ranks, a few tokens at a time.

For token ``i`` with hidden state ``x``, rows ``W`` of the vocabulary and temperature ``T``, the logits are
``z = W x / T``; wanted are ``log p(y) = z_y - logsumexp(z)`` and ``H = -sum_j p_j log p_j``. Only ``c`` tokens' logits
exist at a time, in the forward pass and again in the backward pass, which recomputes them: with the fused kernels the
extra memory is ``c V / ranks`` values of the weights' type however long the row is (in plain torch three times that, in
float32). The softmax is float32 whatever the weights are, and the vocabulary's gradient is summed over the chunks in
float32.

Each rank reduces its columns to a peak, a mass and a moment relative to that peak; two small reductions join them:
with ``d = peak - max(peaks)``, a rank's share of the mass is ``exp(d) mass`` and of the moment
``exp(d) (moment + d mass)``.

Gradients (``p`` recomputed): ``d log p(y) / dz_j = [j = y] - p_j`` and ``dH / dz_j = -p_j (log p_j + H)``.

Suffixes: ``t`` tokens, ``c`` tokens of a chunk, ``m`` width of the model, ``v`` vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime_megatron.kernels import PLAIN, Kernels


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that a rank holds.

    Attributes:
        start: Token id of the first row.
        rows: Rows that stand for token ids; any after them are padding and are left out of the softmax.
        group: Tensor-parallel group, or ``None`` for one rank.
        chunk: Tokens whose logits exist at one time.
        kernels: What runs over the logits.
    """

    start: int
    rows: int
    group: dist.ProcessGroup | None
    chunk: int
    kernels: Kernels = PLAIN


def token_logprobs(
    hidden_tm: Tensor, weight_vm: Tensor, targets_t: Tensor, *, temperature: float, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability and the entropy of its distribution.

    The gradient with respect to ``hidden_tm`` is this rank's share: the caller adds it over the tensor-parallel ranks.

    Args:
        hidden_tm: Hidden states ``[t, m]`` that predict the targets.
        weight_vm: This rank's rows of the output projection ``[v, m]``.
        targets_t: Token ids ``[t]``.
        temperature: Divides the logits.
        shard: Where the rows lie in the vocabulary.

    Returns:
        Log-probabilities and entropies ``[t]`` in nats, float32, the same on all ranks of the group.
    """
    return _TokenLogprobs.apply(hidden_tm, weight_vm, targets_t, 1.0 / temperature, shard)  # type: ignore[no-untyped-call]


def _logits(hidden_cm: Tensor, weight_vm: Tensor, shard: VocabShard) -> Tensor:
    return hidden_cm @ weight_vm[: shard.rows].t()


def _columns(targets_c: Tensor, shard: VocabShard) -> Tensor:
    """Return the targets' rows on this rank, -1 for those of others."""
    rows_c = targets_c - shard.start
    return rows_c.where((rows_c >= 0) & (rows_c < shard.rows), -1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_tm: Tensor, weight_vm: Tensor, targets_t: Tensor, scale: float, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        count = targets_t.numel()
        wide = torch.promote_types(hidden_tm.dtype, torch.float32)
        logprobs_t = hidden_tm.new_empty(count, dtype=wide)
        entropy_t, logsum_t = torch.empty_like(logprobs_t), torch.empty_like(logprobs_t)
        for start in range(0, count, shard.chunk):
            span = slice(start, start + shard.chunk)
            logits_cv = _logits(hidden_tm[span], weight_vm, shard)
            logprobs_t[span], entropy_t[span], logsum_t[span] = _reduce(logits_cv, targets_t[span], scale, shard)
            del logits_cv  # or two chunks' logits exist while the next ones are made
        ctx.save_for_backward(hidden_tm, weight_vm, targets_t, entropy_t, logsum_t)
        ctx.scale, ctx.shard = scale, shard
        return logprobs_t, entropy_t

    @staticmethod
    def backward(ctx: Any, grad_logprobs_t: Tensor, grad_entropy_t: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_tm, weight_vm, targets_t, entropy_t, logsum_t = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grad_logprobs_t, grad_entropy_t = grad_logprobs_t.contiguous(), grad_entropy_t.contiguous()
        grad_hidden_tm = torch.empty_like(hidden_tm)
        grad_weight_vm = torch.zeros_like(weight_vm, dtype=logsum_t.dtype)
        for start in range(0, targets_t.numel(), shard.chunk):
            span = slice(start, start + shard.chunk)
            grad_cv = shard.kernels.vocab_gradient(
                _logits(hidden_tm[span], weight_vm, shard),
                _columns(targets_t[span], shard),
                ctx.scale,
                logsum_t[span],
                entropy_t[span],
                grad_logprobs_t[span],
                grad_entropy_t[span],
            )
            torch.mm(grad_cv, weight_vm[: shard.rows], out=grad_hidden_tm[span])
            shard.kernels.accumulate(grad_weight_vm[: shard.rows], grad_cv, hidden_tm[span])
            del grad_cv
        return grad_hidden_tm, grad_weight_vm.to(weight_vm.dtype), None, None, None


def _reduce(logits_cv: Tensor, targets_c: Tensor, scale: float, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and log-sum-exp ``[c]`` of each row, over all ranks; may overwrite the logits."""
    columns_c = _columns(targets_c, shard)
    peak_c, mass_c, moment_c, target_c = shard.kernels.vocab_statistics(logits_cv, columns_c, scale)
    if shard.group is not None:
        highest_c = peak_c.clone()
        dist.all_reduce(highest_c, op=dist.ReduceOp.MAX, group=shard.group)
        below_c = peak_c - highest_c
        shrink_c = below_c.exp()
        sums_3c = torch.stack((shrink_c * mass_c, shrink_c * (moment_c + below_c * mass_c), target_c))
        dist.all_reduce(sums_3c, group=shard.group)
        peak_c, (mass_c, moment_c, target_c) = highest_c, sums_3c
    log_mass_c = mass_c.log()
    logsum_c = log_mass_c + peak_c
    return target_c - logsum_c, log_mass_c - moment_c / mass_c, logsum_c
