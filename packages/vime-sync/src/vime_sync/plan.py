"""The plan: which elements of which trainer buffer go to which elements of which live parameter, proved complete.

A plan is built once per connection from two descriptions that know nothing of each other: the trainer's manifest
(checkpoint tensors as pieces of buffers) and the recording of the engine's own loaders (slices of checkpoint tensors
into live parameters). Composing them leaves a flat list of strided copies. Every later sync only executes the list.

The proof. Before the first byte moves, for every live parameter of this worker: the boxes that the copies and constants
write are pairwise disjoint, and their volumes add up to the parameter's. Disjoint and equal in volume means that every
live element is written exactly once. Parameters that share storage (tied embeddings) are one live tensor. Buffers that
no loader touches (rotary tables, masks) are constants of the architecture and are listed. Whatever else is left over is
an error, or a tensor that has to be reloaded by the engine's own means, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vime_sync.errors import DtypeMismatchError, IncompletePlanError, ShapeMismatchError
from vime_sync.layout import Box, CheckpointTensor, Region, Shape, boxes_of, contiguous_strides, first_overlap
from vime_sync.record import Fill, Recording, View, Write


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy: source region to a view of a live tensor, both in the shape of `box`.

    Attributes:
        tensor: Checkpoint name.
        box: Which elements of the checkpoint tensor.
        full: The checkpoint tensor's shape.
        source: Where they are on the trainer's side.
        dtype: The checkpoint tensor's dtype.
        live: Name of the live tensor.
        view: Where they go in it.
    """

    tensor: str
    box: Box
    full: Shape
    source: Region
    dtype: torch.dtype
    live: str
    view: View

    @property
    def nbytes(self) -> int:
        """Bytes that the copy reads."""
        return self.box.volume * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Everything that one engine worker needs for any number of syncs.

    Attributes:
        copies: What moves.
        fills: Constants that the loaders write (padding).
        reload: Live tensors that cannot be copied into, each with the reason.
        constants: Live buffers that no loader writes.
        ignored: Checkpoint tensors that this worker has no use for.
        feeds: Checkpoint tensors that the tensors in `reload` are made of.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    reload: Mapping[str, str]
    constants: tuple[str, ...]
    ignored: tuple[str, ...]
    feeds: tuple[CheckpointTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that a sync reads."""
        fed = sum(tensor.numel * tensor.dtype.itemsize for tensor in self.feeds)
        return fed + sum(copy.nbytes for copy in self.copies)

    @property
    def live_names(self) -> list[str]:
        """Live tensors that copies or fills write, in order."""
        return list(dict.fromkeys([c.live for c in self.copies] + [f.live for f in self.fills]))

    def summary(self) -> dict[str, Any]:
        """What a report says of the plan (JSON)."""
        return {
            "copies": len(self.copies),
            "bytes": self.nbytes,
            "fills": len(self.fills),
            "reload": dict(self.reload),
            "constants": len(self.constants),
            "ignored": list(self.ignored),
        }


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """What the plan needs to know of a live tensor.

    Attributes:
        shape: Its shape.
        strides: Its strides.
        dtype: Its dtype.
        required: A parameter (must be covered), not a buffer.
        obstacle: Why it cannot be copied into as loaded (post-processing changed it), or empty.
    """

    shape: Shape
    strides: Shape
    dtype: torch.dtype
    required: bool
    obstacle: str = ""


@dataclass
class _Coverage:
    boxes: list[Box] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def build_plan(
    tensors: Sequence[CheckpointTensor],
    recording: Recording,
    live: Mapping[str, LiveTensor],
    *,
    cast: bool = False,
) -> Plan:
    """Compose a manifest and a recording, and prove the result complete.

    Args:
        tensors: The manifest's tensors.
        recording: What the engine's loaders did with them.
        live: The engine's live tensors; tied ones once.
        cast: Allow a checkpoint dtype that differs from the live one (the copy converts).

    Returns:
        The plan.

    Raises:
        IncompletePlanError: If a required live element is written never or twice.
        DtypeMismatchError: If dtypes differ and `cast` is false.
        ShapeMismatchError: If a slice has no place in the manifest's pieces.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    reload = {item.live: item.reason for item in recording.computed}
    reload |= {name: entry.obstacle for name, entry in live.items() if entry.obstacle}
    coverage: dict[str, _Coverage] = {}
    copies: list[Copy] = []
    for write in recording.writes:
        if write.live in reload:
            continue
        try:
            found = list(_compose(write, by_name[write.source], live[write.live], coverage))
        except ValueError as cause:
            reload[write.live] = f"the loader reorders {write.source}: {cause}"
            continue
        _check_dtype(write, by_name[write.source], live[write.live], cast=cast)
        copies.extend(found)
    for fill in recording.fills:
        if fill.live not in reload:
            _cover(coverage, fill.live, fill.live_view, live[fill.live], "a constant")
    constants = _prove(live, coverage, reload)
    used = {write.source for write in recording.writes} | recording.used
    kept = tuple(c for c in copies if c.live not in reload)
    return Plan(
        copies=kept,
        fills=tuple(f for f in recording.fills if f.live not in reload and 0 not in f.live_view.shape),
        reload=reload,
        constants=tuple(constants),
        ignored=tuple(t.name for t in tensors if t.name not in used),
        feeds=_feeds(tensors, recording, kept, reload),
    )


def _feeds(
    tensors: Sequence[CheckpointTensor], recording: Recording, kept: Sequence[Copy], reload: Mapping[str, str]
) -> tuple[CheckpointTensor, ...]:
    """What the engine's own loaders must be given again: all that is not copied, as computed values name no source."""
    if not reload:
        return ()
    copied = {copy.tensor for copy in kept}
    needed = {write.source for write in recording.writes if write.live in reload}
    return tuple(t for t in tensors if t.name in needed or t.name not in copied)


def _check_dtype(write: Write, tensor: CheckpointTensor, entry: LiveTensor, *, cast: bool) -> None:
    if tensor.dtype != entry.dtype and not cast:
        raise DtypeMismatchError(
            "checkpoint and live dtype differ",
            where=f"tensor {write.source} into {write.live}",
            seen=str(tensor.dtype),
            expected=str(entry.dtype),
            fix="publish the engine's dtype, or connect with cast=True to convert while copying",
        )


def _compose(
    write: Write, tensor: CheckpointTensor, entry: LiveTensor, coverage: dict[str, _Coverage]
) -> Iterable[Copy]:
    """Split one recorded write along the manifest's pieces."""
    view = write.source_view
    found = []
    for part, box in boxes_of(view.offset, view.shape, view.strides, tensor.shape):
        into = _reshaped(_narrowed(write.live_view, part), box.shape)
        moved = 0
        for piece in tensor.pieces:
            common = box.intersect(piece.box)
            if common is None:
                continue
            moved += common.volume
            region = piece.region
            source = Region(
                region.rank,
                region.buffer,
                region.offset + _dot(common.relative_to(piece.box), region.strides),
                common.shape,
                region.strides,
            )
            target = View(into.offset + _dot(common.relative_to(box), into.strides), common.shape, into.strides)
            found.append(Copy(tensor.name, common, tensor.shape, source, tensor.dtype, write.live, target))
        if moved != box.volume:
            raise ShapeMismatchError(
                "a slice that the engine needs is not published",
                where=f"tensor {tensor.name}, box {box.start}+{box.shape}",
                seen=f"{moved} elements",
                expected=f"{box.volume} elements",
            )
    _cover(coverage, write.live, write.live_view, entry, write.source)
    return found


def _dot(index: Shape, strides: Shape) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def _narrowed(view: View, part: Box) -> View:
    return View(view.offset + _dot(part.start, view.strides), part.shape, view.strides)


def _reshaped(view: View, shape: Shape) -> View:
    """The same elements under another shape, without moving any; ValueError where that needs a copy."""
    if view.shape == shape:
        return view
    try:
        strides = torch.empty_strided(view.shape, view.strides, device="meta").view(shape).stride()
    except RuntimeError as cause:
        raise ValueError(f"destination {view.shape}/{view.strides} cannot be seen as {shape}") from cause
    return View(view.offset, shape, tuple(strides))


def _cover(coverage: dict[str, _Coverage], name: str, view: View, entry: LiveTensor, by: str) -> None:
    if entry.strides != contiguous_strides(entry.shape) and 1 not in entry.shape:
        raise ValueError(f"live tensor {name} is not contiguous")
    kept = coverage.setdefault(name, _Coverage())
    for _, box in boxes_of(view.offset, view.shape, view.strides, entry.shape):
        kept.boxes.append(box)
        kept.names.append(by)


def _prove(live: Mapping[str, LiveTensor], coverage: dict[str, _Coverage], reload: Mapping[str, str]) -> list[str]:
    """Check that every required live element is written exactly once; returns the untouched buffers."""
    constants = []
    for name, entry in live.items():
        if name in reload:
            continue
        covered = coverage.get(name)
        if covered is None:
            if entry.required and 0 not in entry.shape:
                raise IncompletePlanError(
                    "no checkpoint tensor writes a live parameter",
                    where=f"live tensor {name}",
                    seen="0 elements",
                    expected=f"shape {entry.shape}",
                    fix="publish the tensor that the model's loaders put there",
                )
            constants.append(name)
            continue
        _disjoint(name, covered)
        numel = 1
        for extent in entry.shape:
            numel *= extent
        written = sum(box.volume for box in covered.boxes)
        if written != numel:
            raise IncompletePlanError(
                "a live parameter is only partly written",
                where=f"live tensor {name}, from {sorted(set(covered.names))}",
                seen=f"{written} elements",
                expected=f"{numel} elements",
                fix="publish the missing part",
            )
    return constants


def _disjoint(name: str, covered: _Coverage) -> None:
    if (pair := first_overlap(covered.boxes)) is None:
        return
    (left, right), (a, b) = pair, (covered.boxes[place] for place in pair)
    raise IncompletePlanError(
        "a live element would be written twice",
        where=f"live tensor {name}",
        seen=f"{covered.names[left]} at {a.start}+{a.shape}, {covered.names[right]} at {b.start}+{b.shape}",
        expected="each live element from one place",
        fix="publish each weight under one name",
    )
