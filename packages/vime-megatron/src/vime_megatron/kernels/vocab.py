"""Triton kernels over rows of logits: one pass to reduce a row, one pass to turn it into its gradient.

The statistics are gathered online (Milakov and Gimelshein, arXiv 1805.02867): when the running peak rises from ``a`` to
``b``, what was summed so far is corrected by ``mass *= exp(a - b)`` and
``moment = exp(a - b) (moment + (a - b) mass)``. Inside, logits are in powers of two, which is what the hardware raises
to. Logits are read in their own type and summed in float32; the gradient overwrites them.

Suffixes as in :mod:`vime_megatron.kernels.plain`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_V = 4096  # columns of a row that a program of the gradient handles
_WARPS = 8
_STATISTICS_BLOCK_V = 8192  # columns that one of the statistics holds at a time: 32 values a thread, fewest joins
_STATISTICS_WARPS = 8
_LOG2E = math.log2(math.e)


@triton.jit
def _gather(z, peak, mass, moment):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add columns to the statistics; logits in powers of two."""
    higher = tl.maximum(peak, tl.max(z, 0))
    shift = peak - higher
    z -= higher
    exp = tl.exp2(z)
    shrink = tl.exp2(shift)
    return higher, shrink * mass + tl.sum(exp, 0), shrink * (moment + shift * mass) + tl.sum(exp * z, 0)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, out_ptr, width, row_stride, count, scale, log2e, BLOCK: tl.constexpr,  # noqa: ANN001, N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    lowest = -1e30  # finite: the products below must not be 0 * infinity
    peak, mass, moment = lowest, 0.0, 0.0
    whole = width // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = tl.load(base + start + tl.arange(0, BLOCK)).to(tl.float32) * (scale * log2e)
        peak, mass, moment = _gather(z, peak, mass, moment)
    cols = whole + tl.arange(0, BLOCK)
    z = tl.load(base + cols, mask=cols < width, other=0.0).to(tl.float32) * (scale * log2e)
    peak, mass, moment = _gather(tl.where(cols < width, z, lowest), peak, mass, moment)
    column = tl.load(target_ptr + row)
    target = tl.load(base + tl.maximum(column, 0)).to(tl.float32) * scale
    tl.store(out_ptr + row, peak / log2e)
    tl.store(out_ptr + count + row, mass)
    tl.store(out_ptr + 2 * count + row, moment / log2e)
    tl.store(out_ptr + 3 * count + row, tl.where(column >= 0, target, 0.0))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, logsum_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr,  # noqa: ANN001
    width, row_stride, scale, BLOCK: tl.constexpr,  # noqa: ANN001, N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    at = logits_ptr + row * row_stride + cols
    logp = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(logsum_ptr + row)
    for_logprob = tl.load(grad_logprob_ptr + row)
    factor = for_logprob + tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    grad = tl.where(cols == tl.load(target_ptr + row), for_logprob, 0.0) - tl.exp(logp) * factor
    tl.store(at, (grad * scale).to(logits_ptr.dtype.element_ty), mask=inside)


def vocab_statistics(logits_cv: Tensor, rows_c: Tensor, scale: float) -> Tensor:
    """Reduce each row; see :func:`vime_megatron.kernels.plain.vocab_statistics`. The logits are left as they are."""
    count, width = logits_cv.shape
    out = torch.empty(4, count, device=logits_cv.device, dtype=torch.float32)
    if count:
        _statistics[(count,)](
            logits_cv, rows_c, out, width, logits_cv.stride(0), count, scale, _LOG2E,
            BLOCK=_STATISTICS_BLOCK_V, num_warps=_STATISTICS_WARPS,
        )  # fmt: skip
    return out


def vocab_gradient(
    logits_cv: Tensor,
    rows_c: Tensor,
    scale: float,
    logsum_c: Tensor,
    entropy_c: Tensor,
    grad_logprob_c: Tensor,
    grad_entropy_c: Tensor,
) -> Tensor:
    """Overwrite the logits by their gradient; see :func:`vime_megatron.kernels.plain.vocab_gradient`."""
    count, width = logits_cv.shape
    if count:
        _gradient[(count, triton.cdiv(width, _BLOCK_V))](
            logits_cv, rows_c, logsum_c, entropy_c, grad_logprob_c, grad_entropy_c,
            width, logits_cv.stride(0), scale, BLOCK=_BLOCK_V, num_warps=_WARPS,
        )  # fmt: skip
    return logits_cv
