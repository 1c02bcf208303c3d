"""Which worker vouches for which element, so that an engine's workers together digest each element once.

Workers of one engine hold overlapping parts of a checkpoint: norms are replicated, key and value heads may be. Digests
are sums, so an element that two workers count would count twice. After the workers have planned, their slices are
compared once and each (tensor, box) is given to the first worker that has it. A tensor is verified if the boxes that
are counted tile it; one of which the engine takes only a part is not (its other bytes never arrive anywhere).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime_sync.errors import TransactionError
from vime_sync.layout import Box
from vime_sync.plan import Plan

Slice = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """What one worker counts.

    Attributes:
        skipped: Indexes of its copies that another worker vouches for.
        verified: Tensors whose digest is checked, over all workers.
        local: This worker alone counts all of it, so it can compare by itself.
    """

    skipped: frozenset[int]
    verified: tuple[str, ...]
    local: bool

    @classmethod
    def alone(cls, plan: Plan) -> Share:
        """The share of an engine's only worker."""
        slices = [(c.tensor, c.box.start, c.box.shape, c.full) for c in plan.copies]
        shares = divide({0: slices})
        return cls(frozenset(shares["skipped"]["0"]), tuple(shares["verified"]), local=True)

    @classmethod
    def from_wire(cls, record: Any, rank: int) -> Share:
        """Read a worker's share of what `divide` made.

        Raises:
            TransactionError: If the record is malformed.
        """
        try:
            skipped = frozenset(int(i) for i in record["skipped"].get(str(rank), ()))
            return cls(skipped, tuple(str(name) for name in record["verified"]), local=len(record["skipped"]) == 1)
        except (TypeError, KeyError, AttributeError, ValueError) as cause:
            raise TransactionError("malformed message", where="shares", seen=repr(record)[:80]) from cause


def divide(workers: Mapping[int, Sequence[Slice]]) -> dict[str, Any]:
    """Give every slice to one worker.

    Args:
        workers: For each worker its copies as (tensor, box start, box shape, tensor shape).

    Returns:
        ``{"skipped": {rank: [copy indexes]}, "verified": [tensor names]}`` (JSON).
    """
    seen: dict[str, set[Box]] = {}
    full: dict[str, tuple[int, ...]] = {}
    skipped: dict[str, list[int]] = {str(rank): [] for rank in workers}
    for rank, slices in workers.items():
        for index, (name, start, shape, whole) in enumerate(slices):
            box = Box(tuple(start), tuple(shape))
            full[name] = tuple(whole)
            boxes = seen.setdefault(name, set())
            if box in boxes:
                skipped[str(rank)].append(index)
            boxes.add(box)
    return {"skipped": skipped, "verified": [name for name, boxes in seen.items() if _tiles(boxes, full[name])]}


def _tiles(boxes: set[Box], shape: tuple[int, ...]) -> bool:
    if sum(box.volume for box in boxes) != math.prod(shape):
        return False
    order = sorted(boxes, key=lambda b: b.start)
    for at, box in enumerate(order):
        for other in order[at + 1 :]:
            if box.start and other.start[0] >= box.start[0] + box.shape[0]:
                break
            if box.intersect(other) is not None:
                return False
    return True
