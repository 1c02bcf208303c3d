"""Which of several trainer ranks serves which bytes, where more than one holds them.

Data-parallel trainer ranks hold the same boxes. The manifest names one holder of each and the others beside it; where
an engine worker can tell how far away they are, it chooses for itself:

* bytes that lie on the worker's own device are read there (`localised`), always from the same rank if several are as
  near, so that what belongs together in a buffer stays together and can be aliased;
* all others are divided among the devices that hold them, by rows, so that every link carries as much as every other
  (`divide_rows`). A mesh of thin links needs that: over one link of seven, six stand idle.

Only where bytes are read from changes. The plan, what is verified and who vouches for it stay as they are, so the
choice of one worker is nobody else's business, and a replica that differs is found by the digest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from vime_sync.layout import CheckpointTensor, Region
from vime_sync.plan import Copy, Plan

BufferKey = tuple[int, str]
#: Fewer bytes than this are not divided: a link that is asked for little is not kept busy by it.
GRAIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer is, seen from an engine worker.

    Attributes:
        device: The device that holds it; buffers of one device share its link.
        local: It is the worker's own.
    """

    device: Hashable
    local: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes that somebody must serve.

    Attributes:
        rows: How many rows; only whole rows are divided.
        row_bytes: Bytes of each.
        holders: Who has all of them.
    """

    rows: int
    row_bytes: int
    holders: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Some rows of a load, and who serves them.

    Attributes:
        begin: First row.
        end: One past the last.
        holder: Index into the load's holders.
    """

    begin: int
    end: int
    holder: int


def divide_rows(loads: Sequence[Load], *, grain: int = GRAIN_BYTES) -> list[list[Stripe]]:
    """Divide loads among their holders so that the holders' sums are as equal as rows allow.

    Those with the fewest holders come first, because they can go nowhere else, then the largest: what cannot be divided
    evens out what could.

    Args:
        loads: What is to be served.
        grain: Loads of fewer bytes are not divided.

    Returns:
        For each load stripes that cover its rows exactly once, in order.
    """
    busy: dict[Hashable, float] = {holder: 0.0 for load in loads for holder in load.holders}
    found: list[list[Stripe]] = [[] for _ in loads]
    order = sorted(range(len(loads)), key=lambda i: (len(loads[i].holders), -loads[i].rows * loads[i].row_bytes, i))
    for index in order:
        load = loads[index]
        size = load.rows * load.row_bytes
        if len(set(load.holders)) == 1 or size < grain or load.rows < 2:
            shares = {min(range(len(load.holders)), key=lambda h: (busy[load.holders[h]], h)): float(size)}
        else:
            shares = _levelled([busy[holder] for holder in load.holders], size)
        found[index] = _in_rows(load, shares)
        for stripe in found[index]:
            busy[load.holders[stripe.holder]] += (stripe.end - stripe.begin) * load.row_bytes
    return found


def _levelled(busy: Sequence[float], size: int) -> dict[int, float]:
    """How much each holder takes so that those who take something end at one level (water that finds its level)."""
    order = sorted(range(len(busy)), key=lambda h: (busy[h], h))
    for count in range(1, len(order) + 1):
        level = (size + sum(busy[h] for h in order[:count])) / count
        if count == len(order) or level <= busy[order[count]]:
            return {h: level - busy[h] for h in order[:count] if level > busy[h]}
    raise AssertionError("a level is always found")


def _in_rows(load: Load, shares: Mapping[int, float]) -> list[Stripe]:
    """Round shares to whole rows without losing any: boundaries are rounded, not lengths."""
    stripes, begin, served = [], 0, 0.0
    for position, (holder, size) in enumerate(shares.items()):
        served += size
        last = position == len(shares) - 1
        end = load.rows if last else min(load.rows, round(served / load.row_bytes))
        if end > begin:
            stripes.append(Stripe(begin, end, holder))
            begin = end
    return stripes


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a copy (of its first dimension), and where they are read.

    Attributes:
        begin: First row.
        end: One past the last.
        source: The region that holds them, as large as they are.
    """

    begin: int
    end: int
    source: Region


def localised(plan: Plan, tensors: Sequence[CheckpointTensor], places: Mapping[BufferKey, Place]) -> Plan:
    """Read what lies on the worker's own device there.

    Args:
        plan: With the sources that the manifest chose.
        tensors: The manifest's tensors, with the other holders.
        places: Where each buffer is.

    Returns:
        The same copies, each from a local holder if it has one (of several the lowest rank), else as before.
    """
    known = {tensor.name: tensor for tensor in tensors}
    copies = []
    for copy in plan.copies:
        near = [r for r in _holders(copy, known[copy.tensor]) if _place(r, places).local]
        source = min(near, key=lambda r: (r.rank, r.buffer)) if near else copy.source
        copies.append(copy if source == copy.source else replace(copy, source=source))
    return replace(plan, copies=tuple(copies))


def striped(
    plan: Plan, tensors: Sequence[CheckpointTensor], places: Mapping[BufferKey, Place], *, grain: int = GRAIN_BYTES
) -> list[list[Part]]:
    """Divide what lies on other devices among those that hold it.

    Args:
        plan: A localised plan.
        tensors: The manifest's tensors, with the other holders.
        places: Where each buffer is; one that is not named stands alone.
        grain: Copies of fewer bytes are not divided.

    Returns:
        For each copy the parts that make it up.
    """
    known = {tensor.name: tensor for tensor in tensors}
    parts = [[Part(0, copy.box.shape[0] if copy.box.shape else 1, copy.source)] for copy in plan.copies]
    indexes, loads, options = [], [], []
    for index, copy in enumerate(plan.copies):
        holders = _holders(copy, known[copy.tensor])
        if len(holders) < 2 or not copy.box.shape or _place(copy.source, places).local:
            continue
        indexes.append(index)
        options.append(holders)
        rows = copy.box.shape[0]
        loads.append(Load(rows, copy.nbytes // rows, tuple(_place(region, places).device for region in holders)))
    for index, holders, stripes in zip(indexes, options, divide_rows(loads, grain=grain), strict=True):
        parts[index] = [Part(s.begin, s.end, _rows(holders[s.holder], s.begin, s.end)) for s in stripes]
    return parts


def _place(region: Region, places: Mapping[BufferKey, Place]) -> Place:
    key = (region.rank, region.buffer)
    return places.get(key, Place(key, local=False))


def _holders(copy: Copy, tensor: CheckpointTensor) -> list[Region]:
    """Every region that holds what a copy reads, the manifest's choice first."""
    found = [copy.source]
    for piece in tensor.pieces:
        if piece.box.intersect(copy.box) != copy.box:
            continue
        at = copy.box.relative_to(piece.box)
        for region in (piece.region, *piece.replicas):
            offset = region.offset + sum(i * s for i, s in zip(at, region.strides, strict=True))
            found.append(Region(region.rank, region.buffer, offset, copy.box.shape, region.strides))
    return list(dict.fromkeys(found))


def _rows(region: Region, begin: int, end: int) -> Region:
    shape = (end - begin, *region.shape[1:])
    return Region(region.rank, region.buffer, region.offset + begin * region.strides[0], shape, region.strides)
