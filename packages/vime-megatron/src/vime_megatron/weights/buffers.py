"""Parameters in a few long-lived flat buffers that never move.

Weight sync describes a checkpoint tensor as regions of flat buffers, and an engine on the same GPU may even run on
them. So every parameter is a view of a buffer from the day it is made, and the optimiser writes in place. Megatron's
distributed optimiser brings such buffers along; otherwise they are made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_megatron.errors import TrainerError

_ALIGN_BYTES = 256  # vector loads and copy engines want aligned starts


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies.

    Attributes:
        buffer: Name of the flat buffer.
        offset: First element.
        shape: The parameter's shape; it is contiguous.
    """

    buffer: str
    offset: int
    shape: tuple[int, ...]


def flatten_parameters(params: Mapping[str, torch.nn.Parameter]) -> list[Tensor]:
    """Move parameters into one flat buffer per type; they become views of it.

    Args:
        params: Parameters by name, in the order in which they shall lie.

    Returns:
        The buffers.
    """
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for param in params.values():
        by_dtype.setdefault(param.dtype, []).append(param)
    buffers = []
    for dtype, members in by_dtype.items():
        step = _ALIGN_BYTES // dtype.itemsize
        sizes = [-(-param.numel() // step) * step for param in members]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=members[0].device)
        offset = 0
        for param, size in zip(members, sizes, strict=True):
            view = buffer[offset : offset + param.numel()].view(param.shape)
            view.copy_(param.data)
            param.data = view
            offset += size
        buffers.append(buffer)
    return buffers


def locate(params: Mapping[str, Tensor], buffers: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Slot]]:
    """Find each parameter in the buffers by its address.

    Args:
        params: Parameters by name.
        buffers: The flat buffers that hold them all.

    Returns:
        The buffers by name, and each parameter's slot.

    Raises:
        TrainerError: A parameter lies in none of the buffers, or is not contiguous.
    """
    named = {f"weights.{i}": buffer for i, buffer in enumerate(buffers)}
    slots: dict[str, Slot] = {}
    for name, param in params.items():
        for key, buffer in named.items():
            start = param.data_ptr() - buffer.data_ptr()
            if 0 <= start < buffer.numel() * buffer.element_size() and param.dtype == buffer.dtype:
                slots[name] = Slot(key, start // param.element_size(), tuple(param.shape))
                break
        if name not in slots or not param.is_contiguous():
            raise TrainerError(
                "a parameter lies outside the weight buffers", where=name, seen=str(tuple(param.stride()))
            )
    return named, slots
