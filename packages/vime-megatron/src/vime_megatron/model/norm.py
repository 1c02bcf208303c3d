"""RMS norm, alone or with the residual sum before it, for Megatron specs and under sequence parallelism.

Megatron wraps torch's norms but refuses sequence parallelism with them. All it takes is a mark on the weight: each rank
norms its own tokens, and Megatron adds the marked weights' gradients over the tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from vime_megatron.kernels import PLAIN, Kernels
from vime_megatron.model.recompute import offer


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight`` over the last axis, statistics in float32 (arXiv 1910.07467).

    Args:
        config: Megatron's configuration: type of the weight and sequence parallelism.
        hidden_size: Width of the last axis.
        eps: Added to the mean square.

    Attributes:
        kernels: What adds and norms.
        selective: Send a recipe with the result, so that its consumer need not keep it.
    """

    kernels: Kernels = PLAIN
    selective: bool = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        """Create the weight, filled with ones."""
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[..., hidden_size]``."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def with_residual(self, residual: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and normalise it.

        Args:
            residual: ``[..., hidden_size]``.
            added: What a block adds to it, or ``None``.

        Returns:
            The normed stream, and the stream to go on with.
        """
        normed, total = self.kernels.add_norm(residual, added, self.weight, self.eps)
        if not self.selective:
            return normed, total
        kept, weight = total.detach(), self.weight.detach()
        return offer(normed, lambda: self.kernels.norm(kept, weight, self.eps)), total
