"""Geometry of checkpoints: boxes of index space, strided regions of flat buffers, and how the two meet.

A *checkpoint tensor* is what a HF checkpoint names: a name, a shape, a dtype. It need not exist as one tensor anywhere.
It is made of *pieces*; a piece is a box of the tensor's index space and the *region* of a long-lived flat buffer that
holds it. A fused QKV matrix, a tensor-parallel shard and an expert inside a stack are all just regions, so a trainer
describes them and gathers nothing.

Every offset and stride counts elements, not bytes, of the buffer's dtype.

Two operations carry the whole package: `boxes_of` turns any strided view of a contiguous tensor into boxes of its index
space (this is how a recorded weight loader is understood), and `intersect` cuts two boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from vime_sync.errors import ManifestError

Shape = tuple[int, ...]

#: Names on the wire are torch's own, without the module prefix.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as it is written in a manifest.

    Args:
        dtype: One of `DTYPES`.

    Returns:
        For example ``"bfloat16"``.

    Raises:
        ManifestError: For a dtype that no transport carries.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ManifestError("unsupported dtype", seen=name, expected=", ".join(DTYPES))
    return name


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of a shape, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Region:
    """A strided block of a flat buffer: where some elements live.

    Attributes:
        rank: The trainer rank whose process owns the buffer.
        buffer: The buffer's name on that rank.
        offset: First element, counted in elements from the buffer's start.
        shape: Extents of the block.
        strides: Elements between neighbours along each dimension.
    """

    rank: int
    buffer: str
    offset: int
    shape: Shape
    strides: Shape

    @property
    def end(self) -> int:
        """One past the last element that the region touches."""
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of an index space.

    Attributes:
        start: First index along each dimension.
        shape: Extent along each dimension.
    """

    start: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return None if any(n <= 0 for n in shape) else Box(start, shape)

    def relative_to(self, outer: Box) -> Shape:
        """Where this box starts inside another one."""
        return tuple(a - b for a, b in zip(self.start, outer.start, strict=True))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Find two boxes of one index space that have an element in common.

    Sorted along the first dimension, a box need be held only against those that begin before it ends.

    Args:
        boxes: Any boxes.

    Returns:
        Their places in `boxes`, or None where all are disjoint.
    """
    order = sorted(range(len(boxes)), key=lambda place: boxes[place].start)
    for at, left in enumerate(order):
        box = boxes[left]
        for right in order[at + 1 :]:
            if box.start and boxes[right].start[0] >= box.start[0] + box.shape[0]:
                break
            if box.intersect(boxes[right]) is not None:
                return left, right
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor and the region that holds it (equal shapes).

    Attributes:
        box: Which elements of the checkpoint tensor.
        region: Where they are.
        index: The piece's place in its rank's own manifest, which is where that rank publishes the piece's digest.
        replicas: Other ranks' regions that hold the same.
    """

    box: Box
    region: Region
    index: int = 0
    replicas: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor as a HF checkpoint names it, made of pieces.

    Attributes:
        name: Its checkpoint name.
        shape: Its full shape.
        dtype: Its dtype; every buffer that a piece lies in has the same.
        pieces: What the describing rank (or, once merged, all ranks together) holds of it.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    def __post_init__(self) -> None:
        """Check that each piece lies inside the tensor and has its region's shape."""
        for piece in self.pieces:
            inside = len(piece.box.start) == len(self.shape) == len(piece.box.shape) and all(
                a >= 0 and a + n <= full
                for a, n, full in zip(piece.box.start, piece.box.shape, self.shape, strict=True)
            )
            if not inside or piece.box.shape != piece.region.shape:
                raise ManifestError(
                    "a piece does not fit its tensor",
                    where=f"rank {piece.region.rank}, tensor {self.name}",
                    seen=f"box {piece.box.start}+{piece.box.shape}, region shape {piece.region.shape}",
                    expected=f"a box inside {self.shape}, as large as its region",
                )


def whole(shape: Shape) -> Box:
    """The box that covers a whole shape."""
    return Box((0,) * len(shape), shape)


def boxes_of(offset: int, shape: Shape, strides: Shape, base: Shape) -> Iterator[tuple[Box, Box]]:
    """Express a strided view of a contiguous tensor as boxes of the tensor's index space.

    Any view that slicing, narrowing, chunking, indexing with integers, reshaping or flattening can make is one box or a
    few; a view that takes every n-th row is split along that dimension until what remains is a box. The order of the
    view's dimensions must be that of the base (a transposed view has no box of equal layout).

    Args:
        offset: First element of the view, in elements of the base.
        shape: Extents of the view.
        strides: Strides of the view, in elements of the base.
        base: Shape of the contiguous base.

    Yields:
        Pairs of a part of the view (a box of the view's own index space) and the box of the base that equals it. Both
        enumerate the same elements in row-major order; their shapes may differ by a reshape.

    Raises:
        ValueError: If the view is transposed, broadcast or otherwise not made of boxes.
    """
    if 0 in shape:
        return
    dims = [(n, s, d) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1]
    if any(a[1] < b[1] for a, b in pairwise(dims)) or any(s <= 0 for _, s, _ in dims):
        raise ValueError(f"view {shape} with strides {strides} is not in the row-major order of {base}")
    box = _single_box(offset, [(n, s) for n, s, _ in dims], base)
    if box is not None:
        yield whole(shape), box
        return
    if not dims:
        raise ValueError(f"offset {offset} lies outside {base}")
    count, stride, dim = dims[0]
    rest_shape = tuple(1 if d == dim else n for d, n in enumerate(shape))
    for index in range(count):
        for part, found in boxes_of(offset + index * stride, rest_shape, strides, base):
            moved = tuple(index if d == dim else a for d, a in enumerate(part.start))
            yield Box(moved, part.shape), found


def _single_box(offset: int, dims: list[tuple[int, int]], base: Shape) -> Box | None:
    """The one box that equals the view (size-1 dimensions already dropped), or None."""
    strides = contiguous_strides(base)
    start, left = [], offset
    for stride in strides:
        index, left = divmod(left, stride)
        start.append(index)
    if base and start[0] >= base[0]:
        return None
    extents = [1] * len(base)
    # From the innermost dimension outwards: each base dimension takes what the view's dimension spans of it.
    dim = len(base) - 1
    for count, stride in reversed(dims):
        while dim >= 0 and strides[dim] < stride:
            dim -= 1
        if dim < 0 or strides[dim] != stride:
            return None
        remaining = count
        while remaining > 1:
            if dim < 0:
                return None
            if remaining <= base[dim]:
                extents[dim], remaining = remaining, 1
            else:  # the view's dimension runs over several base dimensions, so it must fill the inner ones
                if remaining % base[dim]:
                    return None
                extents[dim], remaining = base[dim], remaining // base[dim]
            dim -= 1
    fits = all(a + n <= full for a, n, full in zip(start, extents, base, strict=True))
    return Box(tuple(start), tuple(extents)) if fits else None
