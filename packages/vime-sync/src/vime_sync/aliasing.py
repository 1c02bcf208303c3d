"""Aliased weights: an engine that runs on the trainer's own memory, so that a sync moves nothing.

Every live parameter of the engine becomes a view of a trainer buffer that is mapped into the engine's process. What
makes that possible is a layout, and the plan tells whether the trainer has it: a live tensor can be aliased if all that
the loaders would copy into it lies, in the same order and without gaps, in one contiguous region of one buffer.

The layout contract, for a trainer that wants its engines aliased:

* rows that the engine fuses are neighbours, in the engine's order: ``[q; k; v]``, ``[gate; up]``, stacked experts
  ``[expert 0 gate; up; expert 1 gate; up; ..]``;
* a tensor-parallel engine needs each worker's shard whole: a trainer of the same tensor-parallel size has that, a
  column slice of a larger matrix has not;
* a padded vocabulary is padded in the buffer too, with the constant that the loader writes (zeros);
* every fused tensor starts on a multiple of 16 bytes (256 is a good choice);
* the dtype is the engine's.

`alias_regions` is the checker: it returns the regions, and for every tensor that has none the reason.

Lifetime. The engine's worker holds a *lease* for each publisher that it aliases: a named page of shared memory with the
holder's identity in its name. The publisher refuses to close while a lease is held by a living process. The engine in
turn watches the trainer's processes and refuses to serve when one has died (`vime_sync.vllm_plugin.watch`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vime_sync.control import PREFIX, SHM, ControlBlock, Segment
from vime_sync.errors import AliasError
from vime_sync.layout import CheckpointTensor, Region, Shape, contiguous_strides
from vime_sync.manifest import check_manifest
from vime_sync.model import Model, plan_model
from vime_sync.plan import Copy, Plan
from vime_sync.process import identity, namespace, start_time
from vime_sync.striping import Place, localised
from vime_sync.transports import BufferKey, Importer, KnowsPlaces, make_importer

ALIGN_BYTES = 16


@dataclass(frozen=True)
class AliasMap:
    """Where each live tensor lies in the trainer's buffers.

    Attributes:
        regions: A contiguous region a live tensor.
        refused: Live tensors that have none, each with the reason.
    """

    regions: Mapping[str, Region]
    refused: Mapping[str, str]

    def require(self) -> None:
        """Refuse unless every live tensor has a region.

        Raises:
            AliasError: With the list of tensors that have none.
        """
        if self.refused:
            shown = "; ".join(f"{name}: {reason}" for name, reason in list(self.refused.items())[:12])
            rest = len(self.refused) - 12
            raise AliasError(
                f"{len(self.refused)} of {len(self.refused) + len(self.regions)} live tensors cannot be aliased",
                seen=shown + (f"; and {rest} more" if rest > 0 else ""),
                expected="each one contiguous region of a trainer buffer",
                fix="lay the trainer's buffers out as vime_sync.aliasing says, or copy",
            )


def alias_regions(
    plan: Plan,
    shapes: Mapping[str, Shape],
    sizes: Mapping[BufferKey, int],
    tensors: tuple[CheckpointTensor, ...],
) -> AliasMap:
    """Find the region of every live tensor that a plan writes.

    Args:
        plan: A complete plan.
        shapes: Shapes of the live tensors.
        sizes: Elements of each source buffer.
        tensors: What the trainer publishes (padding must not lie in another tensor).

    Returns:
        The regions and the refusals.
    """
    copies: dict[str, list[Copy]] = {name: [] for name in plan.live_names}
    for copy in plan.copies:
        copies[copy.live].append(copy)
    occupied: dict[BufferKey, list[tuple[int, int]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            key = (piece.region.rank, piece.region.buffer)
            occupied.setdefault(key, []).append((piece.region.offset, piece.region.end))
    regions, refused = {}, {}
    for name, found in copies.items():
        region, reason = _region(shapes[name], found, sizes)
        if region is not None:
            reason = _padding(plan, name, region, occupied[(region.rank, region.buffer)])
        if region is None or reason:
            refused[name] = reason
        else:
            regions[name] = region
    return AliasMap(regions, refused)


def _region(shape: Shape, copies: list[Copy], sizes: Mapping[BufferKey, int]) -> tuple[Region | None, str]:
    """The one region from which all copies of a live tensor come, or why there is none."""
    if not copies:
        return None, "the loaders write only constants into it"
    first = copies[0]
    base = first.source.offset - first.view.offset
    for copy in copies:
        dense = _dense(copy.box.shape, copy.source.strides) and _dense(copy.box.shape, copy.view.strides)
        if not dense:
            return None, f"{copy.tensor} is not contiguous there (rows of a larger matrix)"
        if (copy.source.rank, copy.source.buffer) != (first.source.rank, first.source.buffer):
            return None, f"{first.tensor} and {copy.tensor} lie in different buffers"
        if copy.source.offset - copy.view.offset != base:
            return None, f"{first.tensor} and {copy.tensor} are not neighbours in the engine's order"
    numel = 1
    for extent in shape:
        numel *= extent
    size = sizes[(first.source.rank, first.source.buffer)]
    if base < 0 or base + numel > size:
        return None, f"the buffer ends before its padding (elements {base}..{base + numel} of {size})"
    if base * first.dtype.itemsize % ALIGN_BYTES:
        return None, f"it starts at byte {base * first.dtype.itemsize}, which is no multiple of {ALIGN_BYTES}"
    return Region(first.source.rank, first.source.buffer, base, shape, contiguous_strides(shape)), ""


def _dense(shape: Shape, strides: Shape) -> bool:
    expected = contiguous_strides(shape)
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


def _padding(plan: Plan, name: str, region: Region, occupied: list[tuple[int, int]]) -> str:
    """Why the padding of a live tensor cannot be where it would be, or empty."""
    for fill in plan.fills:
        if fill.live != name:
            continue
        view = fill.live_view
        begin = region.offset + view.offset
        end = begin + 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
        if any(begin < last and first < end for first, last in occupied):
            return "another tensor lies where its padding would be"
    return ""


@dataclass
class AliasBinding:
    """An engine worker's hold on a trainer's memory.

    Attributes:
        publishers: Whose memory it is, by rank.
        processes: The trainer processes that must live.
        importer: Keeps the mapping.
        buffers: The mapped buffers.
        controls: Each rank's control block.
        regions: Where each live tensor lies.
        places: How near each buffer is.
        leases: Tell the publishers that they are in use.
    """

    publishers: Mapping[int, str]
    processes: list[Any]
    importer: Importer
    buffers: Mapping[BufferKey, torch.Tensor]
    controls: Mapping[int, ControlBlock]
    regions: Mapping[str, Region]
    places: Mapping[BufferKey, Place] = field(default_factory=dict)
    leases: list[Segment] = field(default_factory=list)

    def require(self, manifest: Mapping[str, Any]) -> None:
        """Refuse a manifest of other publishers.

        Raises:
            AliasError: If the engine's memory is not that manifest's.
        """
        theirs = {int(source["rank"]): str(source.get("publisher")) for source in manifest["sources"]}
        if any(theirs.get(rank) != publisher for rank, publisher in self.publishers.items()):
            raise AliasError(
                "this engine runs on the memory of another publisher",
                seen=str(theirs),
                expected=str(dict(self.publishers)),
                fix="start the engine again with the new publisher's manifest",
            )

    def check(self, plan: Plan, live: Mapping[str, torch.Tensor]) -> None:
        """Prove that every element that a copy would write already is the element that it would read.

        Raises:
            AliasError: Naming the first live tensor of which that is not so.
        """
        for copy in plan.copies:
            size = copy.dtype.itemsize
            source = self.buffers[(copy.source.rank, copy.source.buffer)].data_ptr() + copy.source.offset * size
            target = live[copy.live].data_ptr() + copy.view.offset * size
            if source != target:
                raise AliasError(
                    "a live tensor is not the trainer's memory",
                    where=f"live tensor {copy.live}, from {copy.tensor}",
                    seen=f"address {target:#x}",
                    expected=f"address {source:#x}",
                    fix="start the engine again with the publisher's manifest",
                )

    def held_version(self) -> int:
        """The version that every publisher says its buffers hold, -1 if they do not all say the same."""
        versions = {control.at_rest() for control in self.controls.values()}
        return versions.pop() if len(versions) == 1 else -1


def bind(model: Model, manifest: Any, assign: Callable[[str, torch.Tensor], None]) -> AliasBinding:
    """Make a model's live tensors views of a trainer's buffers.

    Args:
        model: A model whose parameters were just created; its loaders are recorded, nothing is loaded.
        manifest: The merged manifest of the trainer.
        assign: Makes the named live tensor the given one.

    Returns:
        The binding; keep it for as long as the model lives.

    Raises:
        AliasError: With the list of tensors that are not one contiguous region, or whose padding has other values.
        SyncError: What planning or mapping refuses, by name.
    """
    tensors = check_manifest(manifest)
    importer = _mapper(model, manifest)
    places = importer.places()
    plan = localised(plan_model(model, tensors), tensors, places)
    live = model.live()
    sizes = {
        (int(source["rank"]), str(name)): int(record["numel"])
        for source in manifest["sources"]
        for name, record in source["buffers"].items()
    }
    found = alias_regions(plan, {name: tuple(live[name].shape) for name in plan.live_names}, sizes, tensors)
    found.require()
    needed = {(region.rank, region.buffer) for region in found.regions.values()}
    importer.narrow(needed)
    buffers = importer.open()
    views = {
        name: buffers[(r.rank, r.buffer)].as_strided(
            r.shape, r.strides, buffers[(r.rank, r.buffer)].storage_offset() + r.offset
        )
        for name, r in found.regions.items()
    }
    _check_constants(plan, views)
    for name, view in views.items():
        assign(name, view)
    sources = [s for s in manifest["sources"] if any(int(s["rank"]) == rank for rank, _ in needed)]
    return AliasBinding(
        publishers={int(source["rank"]): str(source["publisher"]) for source in sources},
        processes=[source.get("process") for source in sources],
        importer=importer,
        buffers=buffers,
        controls={
            int(source["rank"]): ControlBlock(
                source["control"]["segment"], int(source["control"]["pieces"]), create=False
            )
            for source in manifest["sources"]  # whose digests another worker's tensors are compared with
        },
        regions=found.regions,
        places=places,
        leases=[_lease(str(source["publisher"])) for source in sources],
    )


def _mapper(model: Model, manifest: Any) -> KnowsPlaces:
    """The importer of a transport that maps memory.

    Raises:
        AliasError: If this one does not.
    """
    importer = make_importer(manifest["transport"], manifest["sources"], set(), model.device)
    if not isinstance(importer, KnowsPlaces):
        raise AliasError(
            "this transport maps no memory that could be aliased",
            seen=str(manifest["transport"]),
            expected="shm or ipc",
        )
    return importer


def _check_constants(plan: Plan, views: Mapping[str, torch.Tensor]) -> None:
    for fill in plan.fills:
        view = views[fill.live]
        padding = view.as_strided(
            fill.live_view.shape, fill.live_view.strides, view.storage_offset() + fill.live_view.offset
        )
        if not bool((padding == fill.value).all()):
            raise AliasError(
                "the padding of a tensor has other values in the trainer's buffer",
                where=f"live tensor {fill.live}",
                expected=str(fill.value),
                fix="fill the padding of the trainer's buffer once, and keep the optimiser away from it",
            )


def _lease(publisher: str) -> Segment:
    me = identity()
    token = f"alias{publisher}x{secrets.token_hex(4)}"
    return Segment(f"{PREFIX}{me['namespace']}-{me['pid']}-{me['start']}-{token}", 1, create=True)


def lease_holders(publisher: str) -> list[int]:
    """Processes of this pid namespace that alias a publisher's memory.

    Args:
        publisher: The publisher's identity, as in its manifest.

    Returns:
        Their pids.
    """
    prefix = f"{PREFIX}{namespace()}-"
    holders = []
    for path in SHM.glob(f"{prefix}*-alias{publisher}x*"):
        pid, start, _ = path.name.removeprefix(prefix).split("-")
        if start_time(int(pid)) == int(start):
            holders.append(int(pid))
    return sorted(holders)
