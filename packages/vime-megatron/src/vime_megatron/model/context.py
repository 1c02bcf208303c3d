"""Context parallelism: a row's tokens are shared by several ranks, and for attention its heads are.

Everything but attention works on each token alone, so a rank runs a slice of the row. For attention the ranks trade:
each gives away its tokens' heads but for its own share, and gets its share of heads for all tokens (DeepSpeed-Ulysses,
arXiv 2309.14509). What then runs is the same attention over whole documents as without context parallelism, whichever
was chosen, so nothing is masked twice, no rank waits for one with a longer causal triangle, and the numbers are those
of one rank. Afterwards the outputs are traded back. Each direction is one collective, and the backward pass of one is
the other.

With fewer key/value heads than ranks, each is sent to all ranks whose queries use it; the gradients come back added.

Log-probabilities are put together on every rank of the group before the loss sees them, since a loss may look at whole
sequences. All of its ranks then compute the same loss, and each takes the gradient of its own slice.

Suffixes: ``t`` tokens of the row, ``s`` those of this rank's slice, ``h`` query heads and ``g`` key/value heads before
the trade, ``i`` and ``j`` the same after it, ``e`` width of a head, ``r`` ranks, ``x`` heads of all three kinds
together, ``k`` predictions of the row and ``c`` those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vime_megatron.model.core_attention import CoreAttention
from vime_megatron.model.packing import PackedTokens


def share_heads(attend: CoreAttention, group: dist.ProcessGroup) -> CoreAttention:
    """Let a core attention see whole rows while each rank holds a slice of them.

    Args:
        attend: The attention over a whole row.
        group: The context-parallel group; its size divides the query heads of this rank, and divides its key/value
            heads or is a multiple of them.

    Returns:
        An attention over slices.
    """
    ranks = group.size()

    def attention(q_she: Tensor, k_sge: Tensor, v_sge: Tensor, row: PackedTokens) -> Tensor:
        copies = max(1, ranks // k_sge.shape[1])
        if copies > 1:
            k_sge, v_sge = (x.repeat_interleave(copies, dim=1) for x in (k_sge, v_sge))
        shares = [x.view(len(x), ranks, -1, x.shape[2]) for x in (q_she, k_sge, v_sge)]
        widths = [share.shape[2] for share in shares]
        traded_txe = _ToHeads.apply(torch.cat(shares, dim=2).flatten(1, 2), group)  # type: ignore[no-untyped-call]
        q_tie, k_tje, v_tje = traded_txe.split(widths, dim=1)
        out_tie = attend(q_tie.contiguous(), k_tje.contiguous(), v_tje.contiguous(), row)
        out_she: Tensor = _ToTokens.apply(out_tie, group)  # type: ignore[no-untyped-call]
        return out_she

    return attention


def _to_heads(x_sxe: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give away tokens' heads, get all tokens of a share of heads: ``[s, x, e]`` to ``[t, x / r, e]``."""
    sent = x_sxe.view(len(x_sxe), group.size(), -1, x_sxe.shape[2]).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _to_tokens(x_tie: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Trade back: ``[t, i, e]`` to ``[s, i * r, e]``."""
    sent = x_tie.contiguous().view(group.size(), -1, *x_tie.shape[1:])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sxe: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x_sxe, group)

    @staticmethod
    def backward(ctx: Any, grad_txe: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad_txe, ctx.group), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tie: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x_tie, group)

    @staticmethod
    def backward(ctx: Any, grad_she: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad_she, ctx.group), None


def gather_predictions(values_c: Tensor, shares: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Put the ranks' values together, in the order of the row.

    Every rank goes on to compute the same from the result, so the gradient of its own values is complete without the
    others' and nothing is added up.

    Args:
        values_c: This rank's values.
        shares: How many each rank has.
        group: The context-parallel group.

    Returns:
        ``[k]``, the same on every rank.
    """
    gathered: Tensor = _Gather.apply(values_c, tuple(shares), group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_c: Tensor, shares: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        rank, most = group.rank(), max(shares)
        ctx.own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        padded = values_c.new_zeros(most)
        padded[: values_c.numel()] = values_c
        parts = [torch.empty_like(padded) for _ in shares]
        if most:
            dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, shares, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad_k: Tensor) -> tuple[Tensor, None, None]:
        return grad_k[ctx.own], None, None
