"""A Triton kernel for the update: clipping, AdamW and the weight in half precision, in one pass.

Per parameter 16 bytes are read (gradient, master, both moments) and 14 written (master, moments, weight). torch's fused
AdamW followed by Megatron's copy reads the master twice and, when it clips, writes the gradient back as well: 38 bytes,
and a launch more for each parameter.

All arithmetic is float32, in the order of :func:`vime_megatron.kernels.plain.adamw`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from vime_megatron.kernels.plain import AdamWState, AdamWTerms

_BLOCK = 2048  # values that one program handles


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    master_ptr, grad_ptr, mean_ptr, square_ptr, weight_ptr, corrections_ptr, count,  # noqa: ANN001
    factor, lr, decay, beta1, rest1, beta2, rest2, eps,  # noqa: ANN001
    BLOCK: tl.constexpr, WRITE: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0) * factor
    mean = beta1 * tl.load(mean_ptr + at, mask=inside, other=0.0) + rest1 * grad
    square = beta2 * tl.load(square_ptr + at, mask=inside, other=0.0) + rest2 * grad * grad
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    deviation = tl.sqrt(square) / tl.load(corrections_ptr + 1) + eps
    master = master - lr * decay * master - lr / tl.load(corrections_ptr) * mean / deviation
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    if WRITE:
        tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), mask=inside)


def adamw(states: Sequence[AdamWState], corrections_n2: Tensor, terms: AdamWTerms) -> None:
    """Update in place; see :func:`vime_megatron.kernels.plain.adamw`. All tensors must be contiguous.

    Args:
        states: The parameters of one group.
        corrections_n2: For each of them, what its moments are divided by.
        terms: The group's settings.
    """
    for state, corrections_2 in zip(states, corrections_n2.unbind(), strict=True):
        count = state.master.numel()
        weight = state.master if state.weight is None else state.weight
        if count:
            _adamw[(triton.cdiv(count, _BLOCK),)](
                state.master, state.grad, state.mean, state.square, weight, corrections_2, count,
                terms.factor, terms.lr, terms.decay, terms.beta1, 1 - terms.beta1, terms.beta2, 1 - terms.beta2,
                terms.eps, BLOCK=_BLOCK, WRITE=state.weight is not None, num_warps=8,
            )  # fmt: skip
