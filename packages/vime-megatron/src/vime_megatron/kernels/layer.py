"""Triton kernels of a decoder layer: gated activation, and split, norm and rotation of queries and keys.

Both recompute in the backward pass what can be derived from their one saved input, so nothing but that input is kept.
All arithmetic is float32; results are rounded once.

Suffixes as in :mod:`vime_megatron.kernels.plain`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_megatron.kernels.plain import HeadLayout

_BLOCK_F = 1024  # elements of a row that one program handles
_BLOCK_T = 32  # tokens that one program handles, for one head


@triton.jit
def _gated_silu_forward(x_ptr, out_ptr, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_backward(x_ptr, grad_ptr, dx_ptr, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = grad * gate * sigmoid
    tl.store(dx_ptr + row * 2 * width + cols, d_gate.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + row * 2 * width + width + cols, d_up.to(dx_ptr.dtype.element_ty), mask=inside)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_t2f: Tensor) -> Tensor:
        x_t2f = x_t2f.contiguous()
        width = x_t2f.shape[-1] // 2
        out_tf = x_t2f.new_empty(*x_t2f.shape[:-1], width)
        rows = out_tf.numel() // width
        if rows:
            _gated_silu_forward[(rows, triton.cdiv(width, _BLOCK_F))](x_t2f, out_tf, width, BLOCK=_BLOCK_F)
        ctx.save_for_backward(x_t2f)
        return out_tf

    @staticmethod
    def backward(ctx: Any, grad_tf: Tensor) -> Tensor:
        (x_t2f,) = ctx.saved_tensors
        grad_tf = grad_tf.contiguous()
        width = grad_tf.shape[-1]
        dx_t2f = torch.empty_like(x_t2f)
        rows = grad_tf.numel() // width
        if rows:
            grid = (rows, triton.cdiv(width, _BLOCK_F))
            _gated_silu_backward[grid](x_t2f, grad_tf, dx_t2f, width, BLOCK=_BLOCK_F)
        return dx_t2f


def gated_silu(x_t2f: Tensor) -> Tensor:
    """Return ``silu(gate) * up``; see :func:`vime_megatron.kernels.plain.gated_silu`."""
    return _GatedSilu.apply(x_t2f)  # type: ignore[no-untyped-call]


@triton.jit
def _heads_forward(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, tokens, row_stride, heads, eps,  # noqa: ANN001
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Norm and rotate one head of a block of tokens."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, PADDED)
    lanes = cols < HALF
    inside = (rows < tokens)[:, None] & lanes[None, :]
    at = rows[:, None].to(tl.int64) * row_stride + head * 2 * HALF + cols[None, :]
    left = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF) + eps)[:, None]
        left = left * rstd * tl.load(weight_ptr + cols, mask=lanes, other=0.0).to(tl.float32)[None, :]
        right = right * rstd * tl.load(weight_ptr + HALF + cols, mask=lanes, other=0.0).to(tl.float32)[None, :]
    angle = rows[:, None] * HALF + cols[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    to = (rows[:, None].to(tl.int64) * heads + head) * 2 * HALF + cols[None, :]
    tl.store(out_ptr + to, (left * cos - right * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + to + HALF, (right * cos + left * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _heads_backward(  # type: ignore[no-untyped-def]
    x_ptr, grad_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, partial_ptr, tokens, row_stride, dx_stride, heads, eps,  # noqa: ANN001
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Undo the rotation and the norm of one head; the weight's gradient is summed over the block only."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, PADDED)
    lanes = cols < HALF
    inside = (rows < tokens)[:, None] & lanes[None, :]
    grad_at = (rows[:, None].to(tl.int64) * heads + head) * 2 * HALF + cols[None, :]
    turned_left = tl.load(grad_ptr + grad_at, mask=inside, other=0.0).to(tl.float32)
    turned_right = tl.load(grad_ptr + grad_at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = rows[:, None] * HALF + cols[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    d_left = turned_left * cos + turned_right * sin
    d_right = turned_right * cos - turned_left * sin
    if NORM:
        at = rows[:, None].to(tl.int64) * row_stride + head * 2 * HALF + cols[None, :]
        left = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF) + eps)[:, None]
        left, right = left * rstd, right * rstd
        partial = partial_ptr + (tl.program_id(0) * heads + head) * 2 * HALF + cols
        tl.store(partial, tl.sum(d_left * left, 0), mask=lanes)
        tl.store(partial + HALF, tl.sum(d_right * right, 0), mask=lanes)
        d_left *= tl.load(weight_ptr + cols, mask=lanes, other=0.0).to(tl.float32)[None, :]
        d_right *= tl.load(weight_ptr + HALF + cols, mask=lanes, other=0.0).to(tl.float32)[None, :]
        mean = ((tl.sum(d_left * left, 1) + tl.sum(d_right * right, 1)) / (2 * HALF))[:, None]
        d_left = rstd * (d_left - left * mean)
        d_right = rstd * (d_right - right * mean)
    to = rows[:, None].to(tl.int64) * dx_stride + head * 2 * HALF + cols[None, :]
    tl.store(dx_ptr + to, d_left.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + to + HALF, d_right.to(dx_ptr.dtype.element_ty), mask=inside)


def _turn(x_tx: Tensor, weight_e: Tensor | None, cos_td: Tensor, sin_td: Tensor, heads: int, eps: float) -> Tensor:
    """Norm and rotate the first ``heads`` heads of the rows; returns ``[t, heads, e]``."""
    tokens, half = x_tx.shape[0], cos_td.shape[1]
    out_the = x_tx.new_empty(tokens, heads, 2 * half)
    _heads_forward[(triton.cdiv(tokens, _BLOCK_T), heads)](
        x_tx, out_the, x_tx if weight_e is None else weight_e, cos_td, sin_td, tokens, x_tx.stride(0), heads, eps,
        HALF=half, PADDED=triton.next_power_of_2(half), BLOCK=_BLOCK_T, NORM=weight_e is not None,
    )  # fmt: skip
    return out_the


def _unturn(
    x_tx: Tensor, grad_the: Tensor, dx_tx: Tensor, weight_e: Tensor | None, cos_td: Tensor, sin_td: Tensor, eps: float
) -> Tensor | None:
    """Write the gradient of :func:`_turn`'s rows into ``dx_tx`` and return that of its weight."""
    tokens, heads, width = grad_the.shape
    blocks = triton.cdiv(tokens, _BLOCK_T)
    norm = weight_e is not None
    partial = torch.empty((blocks, heads, width) if norm else (1,), device=x_tx.device, dtype=torch.float32)
    _heads_backward[(blocks, heads)](
        x_tx, grad_the.contiguous(), dx_tx, weight_e if norm else x_tx, cos_td, sin_td, partial,
        tokens, x_tx.stride(0), dx_tx.stride(0), heads, eps, HALF=width // 2, PADDED=triton.next_power_of_2(width // 2),
        BLOCK=_BLOCK_T, NORM=norm,
    )  # fmt: skip
    return None if weight_e is None else partial.sum(dim=(0, 1)).to(weight_e.dtype)


class _QueryKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_tx: Tensor,
        q_weight_e: Tensor | None,
        k_weight_e: Tensor | None,
        cos_td: Tensor,
        sin_td: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups, width = layout.heads, layout.groups, layout.width
        q_the = _turn(qkv_tx, q_weight_e, cos_td, sin_td, heads, layout.eps)
        k_tge = _turn(qkv_tx[:, heads * width :], k_weight_e, cos_td, sin_td, groups, layout.eps)
        ctx.save_for_backward(qkv_tx, q_weight_e, k_weight_e, cos_td, sin_td)
        ctx.layout = layout
        return q_the, k_tge, qkv_tx[:, (heads + groups) * width :].view(-1, groups, width)

    @staticmethod
    def backward(
        ctx: Any, dq_the: Tensor, dk_tge: Tensor, dv_tge: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        qkv_tx, q_weight_e, k_weight_e, cos_td, sin_td = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        keys, values = layout.heads * layout.width, (layout.heads + layout.groups) * layout.width
        dx_tx = torch.empty_like(qkv_tx, memory_format=torch.contiguous_format)
        d_q = _unturn(qkv_tx, dq_the, dx_tx, q_weight_e, cos_td, sin_td, layout.eps)
        d_k = _unturn(qkv_tx[:, keys:], dk_tge, dx_tx[:, keys:], k_weight_e, cos_td, sin_td, layout.eps)
        dx_tx[:, values:].copy_(dv_tge.flatten(1))
        return dx_tx, d_q, d_k, None, None, None


def query_key_value(
    qkv_tx: Tensor,
    q_weight_e: Tensor | None,
    k_weight_e: Tensor | None,
    cos_td: Tensor,
    sin_td: Tensor,
    layout: HeadLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut, norm and rotate; see :func:`vime_megatron.kernels.plain.query_key_value`.

    A half of a head that is not a power of two wide, as Triton's blocks are, leaves lanes idle.
    """
    return _QueryKeyValue.apply(qkv_tx, q_weight_e, k_weight_e, cos_td, sin_td, layout)  # type: ignore[no-untyped-call]
