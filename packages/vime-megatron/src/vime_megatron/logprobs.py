"""Log-probabilities and entropies over a vocabulary split over ranks, a few tokens at a time.

For token ``i`` with hidden state ``x``, rows ``W`` of the vocabulary and temperature ``T``, the logits are
``z = W x / T``; wanted are ``log p(y) = z_y - logsumexp(z)`` and ``H = -sum_j p_j log p_j``. Only ``c`` tokens' logits
exist at a time, in the forward pass and again in the backward pass, which recomputes them: with the fused kernels the
extra memory is ``c V / ranks`` values of the weights' type however long the row is (in plain torch three times that, in
float32). The softmax is float32 whatever the weights are. With ``float32_logits`` the logits are so too, at twice their
memory: in bfloat16 a logit of 20 is rounded by up to a sixteenth, by the trainer and by the engine each in its way.
Where the matrix library cannot multiply half-precision factors into float32, a few rows at a time are copied to it; the
numbers are the same but for the order of sums, and :func:`settle_logits` says so.

The vocabulary's gradient is summed over the chunks in float32: in the trainer's gradient buffer (``weight.main_grad``)
where there is one, and autograd then gets none to add; else in a buffer of its own, which is returned.

Each rank reduces its columns to a peak, a mass and a moment relative to that peak; two small reductions a row join
them: with ``d = peak - max(peaks)``, a rank's share of the mass is ``exp(d) mass`` and of the moment
``exp(d) (moment + d mass)``.

Gradients (``p`` recomputed): ``d log p(y) / dz_j = [j = y] - p_j`` and ``dH / dz_j = -p_j (log p_j + H)``.

Suffixes: ``t`` tokens, ``c`` tokens of a chunk, ``m`` width of the model, ``v`` vocabulary rows of this rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime_megatron.config import HeadDtype, TrainerConfig
from vime_megatron.kernels import PLAIN, HalfTypes, Kernels, plain
from vime_megatron.platform.build import describe_build

if TYPE_CHECKING:
    from vime_megatron.parallel import Topology

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that a rank holds.

    Attributes:
        start: Token id of the first row.
        rows: Rows that stand for token ids; any after them are padding and are left out of the softmax.
        group: Tensor-parallel group, or ``None`` for one rank.
        chunk: Tokens whose logits exist at one time.
        kernels: What runs over the logits.
        float32_logits: Multiply half-precision states and rows into float32 logits, as they are summed anyway.
    """

    start: int
    rows: int
    group: dist.ProcessGroup | None
    chunk: int
    kernels: Kernels = PLAIN
    float32_logits: bool = False


def vocab_shard(config: TrainerConfig, vocab: int, topology: Topology, kernels: Kernels) -> VocabShard:
    """Return what this rank holds of a vocabulary.

    Args:
        config: Size of a chunk and type of the logits.
        vocab: Token ids of the model.
        topology: The tensor-parallel ranks, which share them.
        kernels: What will run over the logits.
    """
    each = -(-vocab // topology.layout.tp_size)
    start = topology.layout.tp_rank * each
    rows = max(0, min(each, vocab - start))
    wide = config.head_dtype == "float32"
    return VocabShard(start, rows, topology.tp_group, config.logprob_chunk_tokens, kernels, float32_logits=wide)


def settle_logits(head: HeadDtype, dtype: torch.dtype, device: torch.device, kernels: Kernels, *, rank: int) -> str:
    """Say how logits will be computed, and warn, on rank 0, where float32 ones are slow.

    Args:
        head: What was asked for.
        dtype: Type of the weights.
        device: Where they are.
        kernels: What multiplies.
        rank: This rank.

    Returns:
        For :attr:`MegatronTrainer.choices`.
    """
    if head == "model" or dtype not in HalfTypes:
        return str(dtype).removeprefix("torch.")
    if kernels.product is not plain.product:
        return "float32"
    if device.type == "cuda" and rank == 0:
        _log.warning(
            "float32 logits are computed from float32 copies, several times slower: torch %s for %s has no product of "
            "half-precision factors into float32 here; use torch 2.8 or later, or head_dtype='model'",
            torch.__version__,
            describe_build(),
        )
    return "float32 from float32 copies"


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
    rows_vm = weight_vm[: shard.rows]
    if shard.float32_logits and hidden_cm.dtype in HalfTypes:
        return shard.kernels.product(hidden_cm, rows_vm)
    return hidden_cm @ rows_vm.t()


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
        statistics_4t = hidden_tm.new_empty(4, count, dtype=wide)
        columns_t = _columns(targets_t, shard)
        for start in range(0, count, shard.chunk):
            span = slice(start, start + shard.chunk)
            logits_cv = _logits(hidden_tm[span], weight_vm, shard)
            statistics_4t[:, span] = shard.kernels.vocab_statistics(logits_cv, columns_t[span], scale)
            del logits_cv  # or two chunks' logits exist while the next ones are made
        logprobs_t, entropy_t, logsum_t = _join(statistics_4t, shard.group)
        ctx.save_for_backward(hidden_tm, weight_vm, columns_t, entropy_t, logsum_t)
        ctx.sum_vm = getattr(weight_vm, "main_grad", None)  # not saved by autograd, which would refuse changes to it
        ctx.scale, ctx.shard = scale, shard
        return logprobs_t, entropy_t

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_t: Tensor, grad_entropy_t: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_tm, weight_vm, columns_t, entropy_t, logsum_t = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        grad_logprobs_t, grad_entropy_t = grad_logprobs_t.contiguous(), grad_entropy_t.contiguous()
        grad_hidden_tm = torch.empty_like(hidden_tm)
        own_sum = ctx.sum_vm is None
        grad_weight_vm = torch.zeros_like(weight_vm, dtype=logsum_t.dtype) if own_sum else ctx.sum_vm
        for start in range(0, columns_t.numel(), shard.chunk):
            span = slice(start, start + shard.chunk)
            grad_cv = shard.kernels.vocab_gradient(
                _logits(hidden_tm[span], weight_vm, shard),
                columns_t[span],
                ctx.scale,
                logsum_t[span],
                entropy_t[span],
                grad_logprobs_t[span],
                grad_entropy_t[span],
            ).to(weight_vm.dtype)
            torch.mm(grad_cv, weight_vm[: shard.rows], out=grad_hidden_tm[span])
            shard.kernels.accumulate(grad_weight_vm[: shard.rows], grad_cv, hidden_tm[span])
            del grad_cv
        return grad_hidden_tm, grad_weight_vm.to(weight_vm.dtype) if own_sum else None, None, None, None


def _join(statistics_4t: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and log-sum-exp ``[t]`` from each rank's statistics of its own columns."""
    peak_t, mass_t, moment_t, target_t = statistics_4t
    if group is not None:
        highest_t = peak_t.clone()
        dist.all_reduce(highest_t, op=dist.ReduceOp.MAX, group=group)
        below_t = peak_t - highest_t
        shrink_t = below_t.exp()
        sums_3t = torch.stack((shrink_t * mass_t, shrink_t * (moment_t + below_t * mass_t), target_t))
        dist.all_reduce(sums_3t, group=group)
        peak_t, (mass_t, moment_t, target_t) = highest_t, sums_3t
    log_mass_t = mass_t.log()
    logsum_t = log_mass_t + peak_t
    return target_t - logsum_t, log_mass_t - moment_t / mass_t, logsum_t
