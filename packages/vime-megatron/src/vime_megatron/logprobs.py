"""Log-probabilities and entropies over a vocabulary split over ranks, a few tokens at a time.

For token ``i`` with hidden state ``x``, rows ``W`` of the vocabulary and temperature ``T``, the logits are
``z = W x / T``; wanted are ``log p(y) = z_y - logsumexp(z)`` and ``H = -sum_j p_j log p_j``. Only ``c`` tokens' logits
exist at a time, in the forward pass and again in the backward pass, which recomputes them: the extra memory is ``2 c V
/ ranks`` floats however long the row is. The softmax is float32 whatever the weights are.

Gradients (``p`` recomputed): ``d log p(y) / dz_j = [j = y] - p_j`` and ``dH / dz_j = -p_j (log p_j + H)``.

Suffixes: ``t`` tokens, ``c`` tokens of a chunk, ``m`` width of the model, ``v`` vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that a rank holds.

    Attributes:
        start: Token id of the first row.
        rows: Rows that stand for token ids; any after them are padding and are left out of the softmax.
        group: Tensor-parallel group, or ``None`` for one rank.
        chunk: Tokens whose logits exist at one time.
    """

    start: int
    rows: int
    group: dist.ProcessGroup | None
    chunk: int


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


def _logits(hidden_cm: Tensor, weight_vm: Tensor, scale: float, shard: VocabShard) -> Tensor:
    logits_cv = hidden_cm @ weight_vm[: shard.rows].t()
    return logits_cv.float().mul_(scale)


def _pick(targets_c: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return which targets this rank holds, and their rows (0 for the others)."""
    rows_c = targets_c - shard.start
    mine_c = (rows_c >= 0) & (rows_c < shard.rows)
    return mine_c, rows_c.where(mine_c, 0)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_tm: Tensor, weight_vm: Tensor, targets_t: Tensor, scale: float, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        count = targets_t.numel()
        logprobs_t = hidden_tm.new_empty(count, dtype=torch.float32)
        entropy_t, logsum_t = torch.empty_like(logprobs_t), torch.empty_like(logprobs_t)
        for start in range(0, count, shard.chunk):
            span = slice(start, start + shard.chunk)
            logits_cv = _logits(hidden_tm[span], weight_vm, scale, shard)
            logprobs_t[span], entropy_t[span], logsum_t[span] = _reduce(logits_cv, targets_t[span], shard)
        ctx.save_for_backward(hidden_tm, weight_vm, targets_t, entropy_t, logsum_t)
        ctx.scale, ctx.shard = scale, shard
        return logprobs_t, entropy_t

    @staticmethod
    def backward(ctx: Any, grad_logprobs_t: Tensor, grad_entropy_t: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_tm, weight_vm, targets_t, entropy_t, logsum_t = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        rows_vm = weight_vm[: shard.rows]
        grad_hidden_tm = torch.empty_like(hidden_tm)
        grad_weight_vm = torch.zeros_like(weight_vm, dtype=torch.float32)
        for start in range(0, targets_t.numel(), shard.chunk):
            span = slice(start, start + shard.chunk)
            logp_cv = _logits(hidden_tm[span], weight_vm, ctx.scale, shard).sub_(logsum_t[span, None])
            grad_cv = _logits_gradient(
                logp_cv, targets_t[span], entropy_t[span], grad_logprobs_t[span], grad_entropy_t[span], shard
            )
            grad_cv = grad_cv.mul_(ctx.scale).to(hidden_tm.dtype)
            torch.mm(grad_cv, rows_vm, out=grad_hidden_tm[span])
            grad_weight_vm[: shard.rows] += grad_cv.t() @ hidden_tm[span]
        return grad_hidden_tm, grad_weight_vm.to(weight_vm.dtype), None, None, None


def _reduce(logits_cv: Tensor, targets_c: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and log-sum-exp ``[c]`` of each row, over all ranks; overwrites the logits."""
    peak_c = logits_cv.amax(dim=-1)
    if shard.group is not None:
        dist.all_reduce(peak_c, op=dist.ReduceOp.MAX, group=shard.group)
    mine_c, rows_c = _pick(targets_c, shard)
    logits_cv.sub_(peak_c[:, None])
    target_c = logits_cv.gather(1, rows_c[:, None]).squeeze(1).where(mine_c, 0.0)
    exp_cv = logits_cv.exp()
    sums_3c = torch.stack((exp_cv.sum(dim=-1), exp_cv.mul_(logits_cv).sum(dim=-1), target_c))
    if shard.group is not None:
        dist.all_reduce(sums_3c, group=shard.group)
    mass_c, moment_c, target_c = sums_3c
    log_mass_c = mass_c.log()
    return target_c - log_mass_c, log_mass_c - moment_c / mass_c, log_mass_c + peak_c


def _logits_gradient(
    logp_cv: Tensor,
    targets_c: Tensor,
    entropy_c: Tensor,
    grad_logprob_c: Tensor,
    grad_entropy_c: Tensor,
    shard: VocabShard,
) -> Tensor:
    """Return the gradient with respect to the scaled logits ``[c, v]``; overwrites ``logp_cv``."""
    p_cv = logp_cv.exp()
    # -p (g_logprob + g_entropy (log p + H)), then + g_logprob at the target
    factor_cv = logp_cv.add_(entropy_c[:, None]).mul_(grad_entropy_c[:, None]).add_(grad_logprob_c[:, None])
    grad_cv = p_cv.mul_(factor_cv).neg_()
    mine_c, rows_c = _pick(targets_c, shard)
    grad_cv.scatter_add_(1, rows_c[:, None], (grad_logprob_c * mine_c)[:, None])
    return grad_cv
