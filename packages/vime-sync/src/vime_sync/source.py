"""What a trainer rank holds: long-lived flat buffers, and the checkpoint tensors that lie in them.

A `WeightSource` moves nothing. It says where the bytes are, once, so that a publisher can expose the buffers and an
engine can learn which slice goes where. Its one promise is lifetime: as long as a publisher of the source is open the
buffers keep their storage (an optimiser step in place is fine, re-allocation is not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vime_sync.errors import ManifestError
from vime_sync.layout import Box, CheckpointTensor, Piece, Region, Shape, dtype_name, whole


@dataclass(frozen=True)
class WeightSource:
    """The weights of one trainer rank.

    Attributes:
        rank: This process's rank among the publishing trainer ranks.
        buffers: Flat (1-D, contiguous) tensors by name.
        tensors: The checkpoint tensors of which this rank holds something.
    """

    rank: int
    buffers: Mapping[str, torch.Tensor]
    tensors: tuple[CheckpointTensor, ...]

    def __post_init__(self) -> None:
        """Check that buffers are flat, names unique, and regions inside their buffers and of their dtype."""
        for name, buffer in self.buffers.items():
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise ManifestError(
                    "a source buffer must be one flat contiguous tensor",
                    where=f"rank {self.rank}, buffer {name}",
                    seen=f"shape {tuple(buffer.shape)}, strides {buffer.stride()}",
                )
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ManifestError("a checkpoint tensor is described twice", where=f"rank {self.rank}, {tensor.name}")
            seen.add(tensor.name)
            for piece in tensor.pieces:
                self._check_region(tensor, piece.region)

    def _check_region(self, tensor: CheckpointTensor, region: Region) -> None:
        where = f"rank {self.rank}, tensor {tensor.name}"
        buffer = self.buffers.get(region.buffer)
        if region.rank != self.rank or buffer is None:
            raise ManifestError(
                "a region names a buffer that this rank does not have",
                where=where,
                seen=f"rank {region.rank}, buffer {region.buffer!r}",
                expected=f"rank {self.rank}, one of {sorted(self.buffers)}",
            )
        if region.offset < 0 or region.end > buffer.numel() or any(s < 0 for s in region.strides):
            raise ManifestError(
                "a region reaches outside its buffer",
                where=where,
                seen=f"elements {region.offset}..{region.end}, strides {region.strides}",
                expected=f"within 0..{buffer.numel()} of {region.buffer!r}",
            )
        if buffer.dtype != tensor.dtype:
            raise ManifestError(
                "a tensor and the buffer that holds it differ in dtype",
                where=where,
                seen=str(buffer.dtype),
                expected=str(tensor.dtype),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoint tensors that this rank holds (a byte that two tensors share counts twice)."""
        return sum(piece.box.volume * tensor.dtype.itemsize for tensor in self.tensors for piece in tensor.pieces)

    def view(self, region: Region) -> torch.Tensor:
        """The elements of a region, as a view of its buffer."""
        return self.buffers[region.buffer].as_strided(region.shape, region.strides, region.offset)

    @classmethod
    def from_regions(
        cls, buffers: Mapping[str, torch.Tensor], tensors: Iterable[CheckpointTensor], *, rank: int = 0
    ) -> WeightSource:
        """Describe buffers whose layout the caller knows (fused, sharded, stacked).

        Args:
            buffers: Flat tensors by name.
            tensors: Checkpoint tensors whose pieces lie in them.
            rank: This process's rank among the publishing ranks.

        Returns:
            The source.

        Raises:
            ManifestError: If a region does not fit its buffer.
        """
        return cls(rank, dict(buffers), tuple(tensors))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, rank: int = 0) -> WeightSource:
        """Describe a dict of tensors by checkpoint name, without copying any of them.

        A `DTensor` contributes its local shard, at the place in the full tensor where it lies; its other shards come
        from the other ranks. Tensors that are views of one storage share its buffer.

        Args:
            tensors: Name to tensor. Names are those of the HF checkpoint.
            rank: This process's rank among the publishing ranks.

        Returns:
            The source.

        Raises:
            ManifestError: If a tensor's dtype is not carried, or a shard's placement is not a plain box.
        """
        buffers: dict[str, torch.Tensor] = {}
        described = [_describe(name, tensor, rank, buffers) for name, tensor in tensors.items()]
        return cls(rank, buffers, tuple(item for item in described if item is not None))

    @classmethod
    def from_module(cls, module: torch.nn.Module, *, rank: int = 0, prefix: str = "") -> WeightSource:
        """Describe the parameters and persistent buffers of a module whose names are those of the HF checkpoint.

        Works for a plain module and for one whose parameters are `DTensor` shards (FSDP2). Tied parameters appear once.

        Args:
            module: For example a transformers model.
            rank: This process's rank among the publishing ranks.
            prefix: Put in front of every name.

        Returns:
            The source.
        """
        persistent = module.state_dict(keep_vars=True)
        named = {id(t): n for n, t in reversed(list(persistent.items())) if isinstance(t, torch.Tensor)}
        kept = {n: t for n, t in persistent.items() if isinstance(t, torch.Tensor) and named[id(t)] == n}
        return cls.from_tensors({prefix + n: t.detach() for n, t in kept.items()}, rank=rank)

    @classmethod
    def from_safetensors(cls, folder: Path | str, *, rank: int = 0, device: torch.device | str = "cpu") -> WeightSource:
        """Read a HF checkpoint folder into memory and describe it.

        Args:
            folder: Holds ``*.safetensors`` files.
            rank: This process's rank among the publishing ranks.
            device: Where the tensors are to lie: engines on GPUs read device memory only.

        Returns:
            The source; each tensor is a buffer of its own.

        Raises:
            ManifestError: If the folder has no such file, or two files hold the same tensor.
        """
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ManifestError("no safetensors file", where=str(folder), fix="give the folder of a HF checkpoint")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            part = load_file(file)
            if both := tensors.keys() & part.keys():
                raise ManifestError("two files hold the same tensor", where=str(file), seen=min(both))
            tensors |= {name: tensor.to(device) for name, tensor in part.items()}
        return cls.from_tensors(tensors, rank=rank)


def _describe(name: str, tensor: torch.Tensor, rank: int, buffers: dict[str, torch.Tensor]) -> CheckpointTensor | None:
    """One tensor as a checkpoint tensor; its buffer is added to `buffers`. None for an empty local shard."""
    dtype_name(tensor.dtype)
    local, start, shape = _local_shard(name, tensor)
    if local.numel() == 0 and 0 not in shape:
        return None
    buffer, offset = _flat_buffer(local)
    key = f"storage-{buffer.data_ptr():x}-{dtype_name(tensor.dtype)}"
    buffers.setdefault(key, buffer)
    strides = local.stride() if local.dim() else ()
    region = Region(rank, key, offset, tuple(local.shape), tuple(strides))
    return CheckpointTensor(name, shape, tensor.dtype, (Piece(Box(start, tuple(local.shape)), region),))


def _local_shard(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Shape, Shape]:
    """The part of a (possibly distributed) tensor that is here, where it starts, and the full shape."""
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), whole(shape).start, shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    placements = sharded.placements
    if any(p.is_partial() for p in placements):
        raise ManifestError("a partial DTensor has no value yet", where=f"tensor {name}", seen=str(placements))
    local_shape, start = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, placements)
    local = sharded.to_local().detach()
    if tuple(local.shape) != tuple(local_shape):
        raise ManifestError(
            "a DTensor's shard is not a box", where=f"tensor {name}", seen=str(placements), expected="plain sharding"
        )
    return local, tuple(start), shape


def _flat_buffer(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The whole storage of a tensor as a flat tensor of its dtype, and the tensor's offset in it."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // tensor.dtype.itemsize
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (numel,), (1,))
    return flat, int(tensor.storage_offset())
