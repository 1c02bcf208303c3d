"""The files of a checkpoint: torch's distributed checkpoint format, which Megatron-Core calls ``torch_dist``.

One ``__<rank>_0.distcp`` file a rank holds its boxes, ``.metadata`` says which box lies where, ``metadata.json`` and
``common.pt`` make the folder one that Megatron-Core's ``dist_checkpointing`` opens. Written with torch's planner and
file writer; Megatron-Core's own writer forks processes even for a synchronous save, and a process that has started HIP
or CUDA must not fork.

Reading plans from the metadata alone: every box that this rank needs is filled from all stored boxes that it meets, so
any layout reads any other's, and ranks need not wait for each other. The metadata is a pickle, which could run code;
it is read by an unpickler that knows the dozen names a true one is made of and nothing else.
"""

from __future__ import annotations

import json
import pickle  # read by a restricted unpickler only, see below
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from vime_megatron.checkpoint.pieces import Piece
from vime_megatron.errors import CheckpointError
from vime_megatron.peers import Peers

METADATA = ".metadata"
COMMON = "common.pt"
MEGATRON = "metadata.json"
_MEGATRON_SAYS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and those in all, of one rank's share."""


class _Counter:
    """Adds up for a progress callback; ``total`` is set when the plan is made."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done, self.total = progress, 0, 0

    def add(self, count: int) -> None:
        """Tell of ``count`` more bytes."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self.total)


class Writer(FileSystemWriter):
    """Torch's writer, one file a rank, flushed to disk by whoever publishes the folder."""

    def __init__(self, folder: Path) -> None:
        """Write into ``folder``."""
        super().__init__(folder, sync_files=False)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave making the folder to whoever publishes it."""
        return plan

    def storage_meta(self) -> StorageMeta | None:
        """Leave the folder's temporary name out of the metadata."""
        return None


class SavePlanner(DefaultSavePlanner):
    """Offers this rank's pieces.

    Args:
        pieces: What to write.
        progress: Told the bytes that are written.
    """

    def __init__(self, pieces: Iterable[Piece], progress: Progress | None = None) -> None:
        """Index the pieces."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(piece.key, piece.start): piece for piece in pieces}
        self._counter = _Counter(progress)

    def create_local_plan(self) -> SavePlan:
        """List the pieces."""
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's share of the agreement."""
        self._counter.total = sum(self._piece(item).data.nbytes for item in new_plan.items)
        return super().finish_plan(new_plan)

    def _piece(self, item: WriteItem) -> Piece:
        return self._pieces[item.index.fqn, tuple(item.index.offset or ())]

    def keep(self, plan: SavePlan) -> None:
        """Copy the planned pieces to host memory, so that the trainer may go on while they are written."""
        wanted = {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items}
        self._pieces = {
            key: Piece(piece.key, piece.shape, piece.box, piece.data.detach().to("cpu", copy=True))
            for key, piece in self._pieces.items()
            if key in wanted
        }

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a piece; one in host memory as a tensor of its own, since a view is stored with all that it views."""
        data = self._piece(write_item).data.detach()
        self._counter.add(data.nbytes)
        return data.clone(memory_format=torch.contiguous_format) if data.device.type == "cpu" else data


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.data.shape))
    properties = TensorProperties(dtype=piece.data.dtype)
    index = MetadataIndex(piece.key, chunk.offsets)
    data = TensorWriteData(chunk, properties, torch.Size(piece.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)  # by name: what stands before it differs by release


def plan_save(peers: Peers, writer: Writer, planner: SavePlanner, folder: Path) -> tuple[SavePlan, Metadata | None]:
    """Agree on who writes what: each box once, replicas spread over the ranks that have them.

    Args:
        peers: The ranks; all must call.
        writer: Writes this rank's file.
        planner: Knows this rank's pieces.
        folder: For error texts.

    Returns:
        This rank's plan; on rank 0 the metadata too.

    Raises:
        CheckpointError: The pieces do not tile the tensors, on every rank.
    """
    metadata: list[Metadata] = []

    def agree(plans: Sequence[SavePlan]) -> list[SavePlan | str]:
        try:
            agreed, found = planner.create_global_plan(list(plans))
        except ValueError as error:
            return [str(error)] * len(plans)
        metadata.append(found)
        return list(writer.prepare_global_plan(agreed))

    mine = peers.deal(writer.prepare_local_plan(planner.create_local_plan()), agree)
    if isinstance(mine, str):
        raise CheckpointError("the ranks' parts are not the whole model", where=str(folder), seen=mine)
    return planner.finish_plan(mine), metadata[0] if metadata else None


def write_head(folder: Path, writer: Writer, metadata: Metadata, results: list[list[Any]], common: Any) -> None:
    """Write what is not tensors, on rank 0.

    Args:
        folder: The checkpoint.
        writer: Any rank's.
        metadata: From :func:`plan_save`.
        results: What each rank's writer has returned.
        common: Plain values, for readers other than this package.
    """
    writer.finish(metadata, results)
    torch.save(common, folder / COMMON)
    (folder / MEGATRON).write_text(json.dumps(_MEGATRON_SAYS))


class Reader(FileSystemReader):
    """Torch's reader, with an unpickler that runs nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``.

        Raises:
            CheckpointError: It is no metadata, or names something that metadata is not made of.
        """
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
            raise CheckpointError(
                "the checkpoint's metadata cannot be read", where=str(path), seen=str(error)
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError("this is not metadata", where=str(path), seen=type(metadata).__name__)
        return metadata


_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float32", "bfloat16", "float16", "uint8"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses every name that metadata does not need."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up."""
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's metadata")
        return super().find_class(module, name)


class LoadPlanner(DefaultLoadPlanner):
    """Fills this rank's pieces.

    Args:
        pieces: What to fill.
        metadata: What is stored.
        progress: Told the bytes that are read.
    """

    def __init__(self, pieces: Iterable[Piece], metadata: Metadata, progress: Progress | None = None) -> None:
        """Sort the pieces by tensor."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.key, {})[piece.start] = piece
        self._stored = metadata
        self._counter = _Counter(progress)

    def create_local_plan(self) -> LoadPlan:
        """Meet every piece with every stored box of its tensor."""
        items: list[ReadItem] = []
        for key, pieces in self._pieces.items():
            stored = self._stored.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            wanted = [
                ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.data.shape)) for piece in pieces.values()
            ]
            items += create_read_items_for_chunk_list(key, stored, wanted)
        for item in items:
            self._counter.total += self.resolve_tensor(item).nbytes
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a piece that will be filled."""
        piece = self._pieces[read_item.dest_index.fqn][tuple(read_item.dest_index.offset or ())]
        offsets, lengths = read_item.dest_offsets, read_item.lengths
        return piece.data[tuple(slice(at, at + count) for at, count in zip(offsets, lengths, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Count it; the part was filled in place."""
        self._counter.add(tensor.nbytes)


def read_pieces(reader: Reader, metadata: Metadata, pieces: Iterable[Piece], progress: Progress | None = None) -> None:
    """Fill pieces from the files.

    Args:
        reader: Of the checkpoint.
        metadata: From the reader; its tensors cover every piece.
        pieces: Written in place.
        progress: Told the bytes that are read.
    """
    planner = LoadPlanner(pieces, metadata, progress)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
