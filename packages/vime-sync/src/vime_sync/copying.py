"""Executing a plan: every slice copied once, and digested as it landed.

Two ways, chosen when the program is made and reported with every sync:

* ``triton``: all slices that are made of whole 64-bit words move in one kernel, digested on the way
  (`vime_sync.kernels`). The rest (odd sizes, converted dtypes) takes the plain path after it.
* ``torch``: one `copy_` a slice. The digest is taken from the destination after the copy, so that it speaks of the
  bytes that the engine will serve; only a slice that was converted to another dtype is digested at its source.

A program resolves addresses once, so it is built once a connection and holds for as long as nothing moves (which the
receiver checks before each use).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from vime_sync.digest import Digest, DigestMode, Sums, digest_box, seed_of
from vime_sync.errors import TransactionError
from vime_sync.layout import Box, Shape
from vime_sync.plan import Copy, Plan
from vime_sync.record import View
from vime_sync.segments import Placed, Segment, segments_of
from vime_sync.source import WeightSource
from vime_sync.striping import Part
from vime_sync.transports import BufferKey

if TYPE_CHECKING:
    from vime_sync.kernels import SegmentTable, Tuning

Copier = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True)
class Item:
    """One slice, bound to memory.

    Attributes:
        source: Where it is read.
        target: Where it is written (the source itself if it is only digested); same shape.
        box: Which elements of the checkpoint tensor.
        full: The checkpoint tensor's shape.
        name: The checkpoint tensor's name.
    """

    source: torch.Tensor
    target: torch.Tensor
    box: Box
    full: Shape
    name: str


def choose_copier(asked: str, device: torch.device) -> Copier:
    """Decide how slices are moved.

    Args:
        asked: ``"auto"`` (Triton on a GPU where it is installed, otherwise torch), ``"triton"`` or ``"torch"``.
        device: Where the copies run.

    Returns:
        The choice.

    Raises:
        TransactionError: If the name is unknown, or Triton was asked for and is not there.
    """
    present = importlib.util.find_spec("triton") is not None
    if asked == "auto":
        return "triton" if present and device.type == "cuda" else "torch"
    if asked == "torch":
        return "torch"
    if asked != "triton" or not present:
        raise TransactionError(
            "unknown copier" if asked != "triton" else "Triton is not installed",
            seen=repr(asked),
            expected="auto, triton, torch",
        )
    return "triton"


class Mover:
    """Moves or digests a fixed list of slices."""

    def __init__(
        self, items: Iterable[Item], device: torch.device, copier: Copier, *, tuning: Tuning | None = None
    ) -> None:
        """Bind.

        Args:
            items: The slices; their memory must outlive the mover.
            device: Where the copies run (peers' memory may be read from it).
            copier: See `choose_copier`.
            tuning: How the kernel cuts tiles, if not by its defaults.

        Raises:
            TransactionError: If the kernel would have to read memory that its device has no access to.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._items, self._device, self.copier = list(items), device, copier
        self._tables: list[SegmentTable] = []
        self._sums = torch.zeros(0, 2, dtype=torch.int64)
        self._owners = np.zeros(0, dtype=np.intp)
        self._plain = list(range(len(self._items)))
        if copier == "triton":
            for owner in {t.device for item in self._items for t in (item.source, item.target)} - {device}:
                _reach(device, owner)
            self._tabulate(tuning)

    @property
    def plain(self) -> int:
        """How many slices take the plain path."""
        return len(self._plain)

    def prepare(self, digest: DigestMode, *, write: bool = True) -> None:
        """Compile what `run` will need, so that no pause waits for a compiler."""
        with self._on_device():
            for table in self._tables:
                table.compile(write=write, digest=digest)

    def sums(self, *, digest: DigestMode, phase: int, write: bool = True) -> Sums:
        """Move everything; returns when the last byte has landed.

        Args:
            digest: How much to digest.
            phase: The sampling phase.
            write: False only digests.

        Returns:
            uint64 [items, 2]: one digest an item; no rows when `digest` is off.
        """
        with torch.no_grad(), self._on_device():
            if digest != "off" and len(self._owners):
                self._sums.zero_()
            for table in self._tables:
                table.move(write=write, digest=digest, phase=phase)
            plain = [self._one(self._items[index], digest, phase, write=write) for index in self._plain]
            if digest == "off":
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                return np.zeros((0, 2), dtype=np.uint64)
            totals: Sums = np.zeros((len(self._items), 2), dtype=np.uint64)
            if len(self._owners):
                np.add.at(totals, self._owners, self._sums.cpu().numpy().view(np.uint64))
            if plain:
                totals[self._plain] = torch.stack(plain).cpu().numpy().view(np.uint64)
        return totals

    def run(self, *, digest: DigestMode, phase: int, write: bool = True) -> list[Digest]:
        """What `sums` does.

        Returns:
            One digest an item; empty when `digest` is off.
        """
        return [Digest.from_pair(pair) for pair in self.sums(digest=digest, phase=phase, write=write).tolist()]

    def _tabulate(self, tuning: Tuning | None) -> None:
        """Put the items that are whole words into one table of dense and one of strided segments."""
        from vime_sync.kernels import SegmentTable

        kinds: dict[bool, list[tuple[int, Segment]]] = {False: [], True: []}
        self._plain = []
        for index, item in enumerate(self._items):
            found = _segments(item)
            if found is None:
                self._plain.append(index)
            for segment in found or ():
                kinds[segment.rows > 1].append((index, segment))
        self._owners = np.array([index for kind in kinds.values() for index, _ in kind], dtype=np.intp)
        self._sums = torch.zeros(len(self._owners), 2, dtype=torch.int64, device=self._device)
        begin = 0
        for kind in kinds.values():
            if kind:
                segments = [segment for _, segment in kind]
                seeds = [seed_of(self._items[index].name) for index, _ in kind]
                sums = self._sums[begin : begin + len(kind)]
                self._tables.append(SegmentTable(segments, seeds, self._device, sums, tuning=tuning))
                begin += len(kind)

    def _one(self, item: Item, digest: DigestMode, phase: int, *, write: bool) -> torch.Tensor:
        if write:
            item.target.copy_(item.source)
        landed = item.target if item.target.dtype == item.source.dtype else item.source
        return digest_box(landed, item.box, item.full, item.name, mode=digest, phase=phase)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def _reach(reader: torch.device, owner: torch.device) -> None:
    """Let kernels on one device dereference addresses of another.

    Memory that came by IPC is mapped for the importing device and needs none of this; two devices of one process do.
    torch gives access as a side effect of a copy: it runs one on the device that holds the source, and lets that device
    reach the other one. So a copy from the reader is what is needed, and the usual direction alone leaves the reader
    with an illegal access.

    Raises:
        TransactionError: If there is no such access.
    """
    possible = reader.type == owner.type == "cuda" and torch.cuda.can_device_access_peer(reader, owner)
    if not possible:
        raise TransactionError(
            "a kernel cannot read this memory",
            seen=f"memory of {owner}, a kernel on {reader}",
            expected="memory of that device, or of a peer that it can access",
            fix='use copier="torch"',
        )
    for one, other in ((reader, owner), (owner, reader)):
        torch.empty(1, device=other).copy_(torch.zeros(1, device=one))
        torch.cuda.synchronize(one)


def _segments(item: Item) -> list[Segment] | None:
    """An item as segments, if it is made of whole words and not converted."""
    if item.source.dtype != item.target.dtype:
        return None
    sides = [Placed(t.data_ptr(), tuple(t.stride())) for t in (item.source, item.target)]
    return segments_of(sides[0], sides[1], item.box, item.full, item.source.element_size())


class CopyProgram:
    """A plan bound to memory: source buffers on one side, live tensors (or their shadows) on the other."""

    def __init__(
        self,
        plan: Plan,
        buffers: Mapping[BufferKey, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        copier: Copier = "torch",
        parts: Sequence[Sequence[Part]] | None = None,
    ) -> None:
        """Resolve every copy to pairs of views.

        Args:
            plan: What goes where.
            buffers: Flat source buffers by (rank, buffer).
            into: Destination tensors by live name.
            device: Where the copies run.
            copier: See `choose_copier`.
            parts: For each copy where its rows are read (`vime_sync.striping`), if not all at its source.
        """
        self.plan = plan
        self._into = {name: tensor.detach() for name, tensor in into.items()}
        chosen = [[whole_part(copy)] for copy in plan.copies] if parts is None else parts
        both = zip(plan.copies, chosen, strict=True)
        items = [self._item(copy, part, buffers) for copy, found in both for part in found]
        self._copy_of = np.repeat(np.arange(len(plan.copies)), [len(found) for found in chosen])
        self.mover = Mover(items, device, copier)

    def _item(self, copy: Copy, part: Part, buffers: Mapping[BufferKey, torch.Tensor]) -> Item:
        source, box, view = part.source, copy.box, copy.view
        if box.shape:
            box = Box((box.start[0] + part.begin, *box.start[1:]), source.shape)
            view = View(view.offset + part.begin * view.strides[0], source.shape, view.strides)
        return Item(
            buffers[(source.rank, source.buffer)].as_strided(source.shape, source.strides, source.offset),
            _within(self._into[copy.live], view.shape, view.strides, view.offset),
            box,
            copy.full,
            copy.tensor,
        )

    def sums(self, *, digest: DigestMode, phase: int, write: bool = True) -> Sums:
        """Copy everything; returns when the last byte has landed.

        Args:
            digest: How much to digest.
            phase: The sampling phase.
            write: False only digests what is live (aliased weights are there already).

        Returns:
            uint64 [copies, 2]: one digest a copy; no rows when `digest` is off.
        """
        if not write and digest == "off":
            return np.zeros((0, 2), dtype=np.uint64)
        with torch.no_grad():
            for fill in self.plan.fills if write else ():
                view = fill.live_view
                _within(self._into[fill.live], view.shape, view.strides, view.offset).fill_(fill.value)
        found = self.mover.sums(digest=digest, phase=phase, write=write)
        if digest == "off" or len(found) == len(self.plan.copies):
            return found
        totals: Sums = np.zeros((len(self.plan.copies), 2), dtype=np.uint64)
        np.add.at(totals, self._copy_of, found)
        return totals

    def run(self, *, digest: DigestMode, phase: int, write: bool = True) -> list[Digest]:
        """What `sums` does.

        Returns:
            One digest a copy; empty when `digest` is off.
        """
        return [Digest.from_pair(pair) for pair in self.sums(digest=digest, phase=phase, write=write).tolist()]


class SourceDigester:
    """Digests what a trainer rank holds, piece by piece in the order of its manifest."""

    def __init__(self, source: WeightSource, copier: str = "auto") -> None:
        """Bind to the source's buffers, which keep their storage.

        Args:
            source: What the rank holds.
            copier: See `choose_copier`.
        """
        by_device: dict[torch.device, list[tuple[int, Item]]] = {}
        pieces = [(tensor, piece) for tensor in source.tensors for piece in tensor.pieces]
        for index, (tensor, piece) in enumerate(pieces):
            view = source.view(piece.region)
            item = Item(view, view, piece.box, tensor.shape, tensor.name)
            by_device.setdefault(view.device, []).append((index, item))
        self._count = len(pieces)
        self._movers = [
            ([index for index, _ in found], Mover([item for _, item in found], device, choose_copier(copier, device)))
            for device, found in by_device.items()
        ]

    def sums(self, mode: DigestMode, phase: int) -> Sums:
        """Digest.

        Args:
            mode: How much.
            phase: The sampling phase.

        Returns:
            uint64 [pieces, 2]: one digest a piece; no rows when `mode` is off.
        """
        if mode == "off":
            return np.zeros((0, 2), dtype=np.uint64)
        result: Sums = np.zeros((self._count, 2), dtype=np.uint64)
        for places, mover in self._movers:
            result[places] = mover.sums(digest=mode, phase=phase, write=False)
        return result


def whole_part(copy: Copy) -> Part:
    """All of a copy, read where the plan says."""
    return Part(0, copy.box.shape[0] if copy.box.shape else 1, copy.source)


def _within(base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return base.as_strided(shape, strides, base.storage_offset() + offset)
