"""Triton kernels of the residual stream: the sum and its RMS norm in one pass, and one pass back.

Forward, a row is read once from each addend; the sum and its norm are written. Backward, the gradient of the norm and
the one that comes along the residual are read with the sum, and their total is written: autograd has nothing left to
add. A program walks over many rows and keeps its part of the weight's gradient in registers; the parts are added last,
in a fixed order.

All arithmetic is float32. The sum is rounded to the activations' type before it is normed, as it is when it is written
first and read again, so that recomputing the norm from the sum gives the same bits.

Suffixes as in :mod:`vime_megatron.kernels.plain`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528  # of the backward pass: four for each multiprocessor of an H200


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, added_ptr, sum_ptr, out_ptr, weight_ptr, rstd_ptr, width, eps,  # noqa: ANN001
    BLOCK: tl.constexpr, ADD: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = row * width + cols
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    sum_ptr, weight_ptr, rstd_ptr, grad_ptr, along_ptr, dx_ptr, partial_ptr, rows, programs, width,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, programs):
        at = tl.cast(row, tl.int64) * width + cols
        rstd = tl.load(rstd_ptr + row)
        normed = tl.load(sum_ptr + at, mask=inside, other=0.0).to(tl.float32) * rstd
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        along = tl.load(along_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += grad * normed
        grad *= weight
        dx = along + rstd * (grad - normed * (tl.sum(grad * normed, 0) / width))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * width + cols, total, mask=inside)


def _warps(block: int) -> int:
    """Give each thread 16 values of a row at most, as far as a program has threads."""
    return min(16, max(1, block // 512))


def _run_forward(x_tm: Tensor, added_tm: Tensor | None, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, sum and reciprocal deviations ``[t]``; the sum is ``x_tm`` itself when nothing is added."""
    width = weight_m.numel()
    rows, block = x_tm.numel() // width, triton.next_power_of_2(width)
    sum_tm = x_tm if added_tm is None else torch.empty_like(x_tm)
    out_tm = torch.empty_like(x_tm)
    rstd_t = torch.empty(rows, device=x_tm.device, dtype=torch.float32)
    if rows:
        _forward[(rows,)](
            x_tm, x_tm if added_tm is None else added_tm, sum_tm, out_tm, weight_m, rstd_t, width, eps,
            BLOCK=block, ADD=added_tm is not None, num_warps=_warps(block),
        )  # fmt: skip
    return out_tm, sum_tm, rstd_t


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_tm: Tensor, added_tm: Tensor | None, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out_tm, sum_tm, rstd_t = _run_forward(x_tm, added_tm, weight_m, eps)
        ctx.save_for_backward(sum_tm, weight_m, rstd_t)
        ctx.adds = added_tm is not None
        return out_tm, sum_tm

    @staticmethod
    def backward(ctx: Any, grad_tm: Tensor, along_tm: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        sum_tm, weight_m, rstd_t = ctx.saved_tensors
        width, rows = weight_m.numel(), rstd_t.numel()
        block, programs = triton.next_power_of_2(width), min(_PROGRAMS, rows)
        dx_tm = torch.empty_like(sum_tm)
        partial_pm = torch.empty(programs, width, device=dx_tm.device, dtype=torch.float32)
        if rows:
            _backward[(programs,)](
                sum_tm, weight_m, rstd_t, grad_tm.contiguous(), along_tm.contiguous(), dx_tm, partial_pm,
                rows, programs, width, BLOCK=block, num_warps=_warps(block),
            )  # fmt: skip
        return dx_tm, dx_tm if ctx.adds else None, partial_pm.sum(dim=0).to(weight_m.dtype), None


def add_norm(x_tm: Tensor, added_tm: Tensor | None, weight_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and norm; see :func:`vime_megatron.kernels.plain.add_norm`."""
    added_tm = None if added_tm is None else added_tm.contiguous()
    return _AddNorm.apply(x_tm.contiguous(), added_tm, weight_m, eps)  # type: ignore[no-untyped-call]


def norm(x_tm: Tensor, weight_m: Tensor, eps: float) -> Tensor:
    """Return the norm alone, with no way back: bit for bit what :func:`add_norm` returned for this sum."""
    return _run_forward(x_tm.contiguous(), None, weight_m, eps)[0]
