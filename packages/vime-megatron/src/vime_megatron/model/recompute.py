"""Selective recomputation: keep a cheap step's input, not its output.

The output of a norm or of a gated activation is kept by the matrix product that consumes it, although one cheap pass
over an input that is kept anyway gives it again. While such a product runs, :func:`instead_of` replaces the tensor in
what autograd saves by a recipe; the backward pass cooks it. Nothing is replayed through autograd, no random state is
touched, and the value is bit for bit the same, since the same kernel runs on the same input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_RECIPE = "vime_recipe"


@dataclass(frozen=True)
class _Recipe:
    """A tensor that is computed when it is asked for."""

    cook: Callable[[], Tensor]


def instead_of(value: Tensor, cook: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Let autograd save how to compute a tensor instead of the tensor, for operations inside the context.

    Args:
        value: What would be saved.
        cook: Computes it again, from tensors that live on regardless.

    Returns:
        The context. Other tensors saved inside it are kept as usual.
    """
    address, count = value.data_ptr(), value.numel()

    def pack(saved: Tensor) -> Tensor | _Recipe:
        if saved.data_ptr() != address or saved.numel() != count:
            return saved
        shape = saved.shape
        return _Recipe(lambda: cook().view(shape))

    def unpack(kept: Tensor | _Recipe) -> Tensor:
        return kept.cook() if isinstance(kept, _Recipe) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def offer(value: Tensor, cook: Callable[[], Tensor]) -> Tensor:
    """Attach a recipe to a tensor, for the module that will consume it."""
    setattr(value, _RECIPE, cook)
    return value


def accept(value: Tensor) -> AbstractContextManager[Any]:
    """Use the recipe that came with a tensor; without one, everything is saved as usual."""
    cook = getattr(value, _RECIPE, None)
    return nullcontext() if cook is None else instead_of(value, cook)
