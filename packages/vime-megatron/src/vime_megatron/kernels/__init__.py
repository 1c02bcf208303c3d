"""The memory-bound steps between the matrix products, and which implementation of them runs.

Six steps move far more bytes than they compute: the residual sums with their norms, the gated activation, the norm and
rotation of queries and keys, the softmax over the vocabulary, the sum of weight gradients and the update. In plain
torch each is a chain of passes over its tensors; fused, each input is read once and each output written once.

``plain`` holds them in torch, for any device and type, and is the definition that the others are tested against.
``norm``, ``layer``, ``vocab`` and ``adamw`` hold Triton kernels, which both vendors' compilers take. A trainer chooses
once, says which, and a choice can be forced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_megatron.config import KernelBackend
from vime_megatron.errors import PlatformError
from vime_megatron.kernels import plain

if TYPE_CHECKING:
    from vime_megatron.kernels.plain import (
        AdamWState,
        AdamWTerms,
        AddNorm,
        QueryKeyValue,
        VocabGradient,
        VocabStatistics,
    )

HalfTypes = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernels:
    """One implementation of each step; see :mod:`vime_megatron.kernels.plain` for what they compute.

    Attributes:
        name: What was chosen, for logs and reports.
        add_norm: Differentiable sum of the residual stream and its norm.
        norm: The norm alone, to recompute it.
        gated_silu: Differentiable ``silu(gate) * up`` of ``[..., 2f]``.
        query_key_value: Differentiable split, norm and rotation of a stacked projection.
        vocab_statistics: Softmax statistics of a block of logits.
        vocab_gradient: Gradient of log-probability and entropy with respect to a block of logits.
        product: ``a b^T`` in float32 from half-precision factors.
        adamw: One update of a group of parameters; ``None`` leaves it to torch's and Megatron's.
        accumulate: ``sum += a^T b`` in float32.
    """

    name: str
    add_norm: AddNorm
    norm: Callable[[Tensor, Tensor, float], Tensor]
    gated_silu: Callable[[Tensor], Tensor]
    query_key_value: QueryKeyValue
    vocab_statistics: VocabStatistics
    vocab_gradient: VocabGradient
    accumulate: Callable[[Tensor, Tensor, Tensor], None]
    product: Callable[[Tensor, Tensor], Tensor]
    adamw: Callable[[Sequence[AdamWState], Tensor, AdamWTerms], None] | None = None


PLAIN = Kernels(
    name="torch",
    add_norm=plain.add_norm,
    norm=plain.norm,
    gated_silu=plain.gated_silu,
    query_key_value=plain.query_key_value,
    vocab_statistics=plain.vocab_statistics,
    vocab_gradient=plain.vocab_gradient,
    accumulate=plain.accumulate,
    product=plain.product,
)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return plain.product_wide if device.type == "cuda" and plain.wide_products_work(device, dtype) else plain.product


def triton_kernels(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Kernels:
    """Return the fused implementation.

    Args:
        device: Where the tensors are; decides, with their type, whether the matrix library can add in float32.
        dtype: Type of the activations.

    Returns:
        The Triton kernels.

    Raises:
        ImportError: Triton is not installed.
    """
    from vime_megatron.kernels import adamw, layer, norm, vocab

    half = dtype if dtype in HalfTypes else torch.bfloat16
    wide = device.type == "cuda" and plain.wide_sums_work(device, half)
    return Kernels(
        name="triton, float32 sums inside the matrix product" if wide else "triton",
        add_norm=norm.add_norm,
        norm=norm.norm,
        gated_silu=layer.gated_silu,
        query_key_value=layer.query_key_value,
        vocab_statistics=vocab.vocab_statistics,
        vocab_gradient=vocab.vocab_gradient,
        accumulate=plain.accumulate_wide if wide else plain.accumulate,
        product=_product(device, half),
        adamw=adamw.adamw,
    )


def select_kernels(backend: KernelBackend, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose the implementation once.

    Args:
        backend: What was asked for; ``auto`` takes Triton on a GPU in half precision, else torch.
        device: Where the model runs.
        dtype: Type of the activations.

    Returns:
        The kernels; their ``name`` says which.

    Raises:
        PlatformError: Triton was asked for (or is needed by ``auto`` on a GPU) and cannot run.
    """
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or dtype not in HalfTypes)):
        return replace(PLAIN, product=_product(device, dtype)) if dtype in HalfTypes else PLAIN
    if device.type != "cuda":
        raise PlatformError(
            "the Triton kernels cannot run here",
            seen=str(device),
            expected="a GPU",
            fix="use kernels='auto' or 'torch'",
        )
    try:
        return triton_kernels(device, dtype)
    except ImportError as error:
        raise PlatformError(
            "Triton is not installed",
            seen=str(error),
            expected="the triton that belongs to this torch",
            fix="install it, or choose the slower path with kernels='torch'",
        ) from error
