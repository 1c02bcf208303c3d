"""This rank's weights as vime-sync regions: the family's mapping laid over the flat parameter buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from vime_sync import Box, CheckpointTensor, Piece, Region, WeightSource

from vime_megatron.families.mapping import Placement
from vime_megatron.weights.buffers import Slot


def weight_source(
    placed: Sequence[Placement], buffers: Mapping[str, Tensor], slots: Mapping[str, Slot], *, rank: int
) -> WeightSource:
    """Describe the weights; nothing is copied.

    Args:
        placed: What this rank holds.
        buffers: The flat buffers by name.
        slots: Where each parameter lies in them.
        rank: This rank.

    Returns:
        The source.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[Piece]] = {}
    homes: dict[str, str] = {}
    for place in placed:
        slot = slots[place.param]
        region = _region(place, slot, rank)
        box = Box(tuple(start for start, _ in place.box), region.shape)
        shapes[place.name], homes[place.name] = place.shape, slot.buffer
        pieces.setdefault(place.name, []).append(Piece(box, region))
    tensors = [
        CheckpointTensor(name, shape, buffers[homes[name]].dtype, tuple(pieces[name])) for name, shape in shapes.items()
    ]
    return WeightSource.from_regions({name: buffer.detach() for name, buffer in buffers.items()}, tensors, rank=rank)


def _region(place: Placement, slot: Slot, rank: int) -> Region:
    strides = [1] * len(slot.shape)
    for axis in range(len(slot.shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * slot.shape[axis + 1]
    offset = slot.offset + sum(start * stride for (start, _), stride in zip(place.local, strides, strict=True))
    shape = tuple(stop - start for start, stop in place.local)
    return Region(rank, slot.buffer, offset, shape, tuple(strides))
