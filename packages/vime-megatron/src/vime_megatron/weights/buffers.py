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
from vime_sync import shared_empty

from vime_megatron.errors import TrainerError

_ALIGN_BYTES = 256  # vector loads and copy engines want aligned starts
# vLLM pads a vocabulary to a multiple of 64 rows of zeros. An engine that runs on this memory reads them, so they are
# here, behind the last row, and belong to nobody.
_VOCABULARY = ("word_embeddings", "output_layer")
_VOCABULARY_ROWS = 64


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


def flatten_parameters(params: Mapping[str, torch.nn.Parameter], *, shared: bool = False) -> list[Tensor]:
    """Move parameters into one flat buffer per type; they become views of it.

    Args:
        params: Parameters by name, in the order in which they shall lie.
        shared: Put buffers of CPU memory into shared memory, where engines of the same host can run on them.

    Returns:
        The buffers.

    Raises:
        TransportError: There is not enough shared memory.
    """
    by_dtype: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
    for name, param in params.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    buffers = []
    for dtype, named in by_dtype.items():
        members = list(named.values())
        sizes = [_room(name, param) for name, param in named.items()]
        if shared and members[0].device.type == "cpu":
            buffer = shared_empty(sum(sizes), dtype).zero_()
        else:
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=members[0].device)
        offset = 0
        for param, size in zip(members, sizes, strict=True):
            view = buffer[offset : offset + param.numel()].view(param.shape)
            view.copy_(param.data)
            param.data = view
            offset += size
        buffers.append(buffer)
    return buffers


def _room(name: str, param: torch.nn.Parameter) -> int:
    """Return the elements to set aside for a parameter: aligned, and a vocabulary as long as an engine pads it."""
    numel = param.numel()
    if any(part in name for part in _VOCABULARY):
        numel = -(-param.shape[0] // _VOCABULARY_ROWS) * _VOCABULARY_ROWS * param.shape[1]
    step = _ALIGN_BYTES // param.dtype.itemsize
    return -(-numel // step) * step


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
