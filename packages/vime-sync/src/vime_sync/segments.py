"""Strided copies as runs of 64-bit words: the form in which a device kernel can move and digest them.

A copy has three geometries over one index space: where an element is read, where it is written, and its place in the
checkpoint tensor (for the digest). Neighbouring dimensions that are dense in all three are merged; what remains is
nearly always one dense run (a whole tensor, a row slice, an expert of a stack) or equally spaced rows (a column slice).
A `Segment` is such a set of rows, counted in 64-bit words, because the digest is defined on words and because words are
what a kernel should move. A copy whose rows do not start and end on words, or that converts its elements, has no
segments and takes the plain path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from vime_sync.layout import Box, Shape, contiguous_strides

WORD = 8
#: A copy that would need more segments than this is left to the plain path.
MAX_SEGMENTS = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """Equally spaced rows of words.

    Attributes:
        source: First word's byte address on the reading side.
        target: First word's byte address on the writing side.
        rows: How many rows.
        row_words: Words of a row; dense on both sides and in the checkpoint tensor.
        source_stride: Bytes from one row to the next on the reading side.
        target_stride: Bytes from one row to the next on the writing side.
        word: Index of the first word within the checkpoint tensor.
        word_stride: Words from one row to the next within the checkpoint tensor.
    """

    source: int
    target: int
    rows: int
    row_words: int
    source_stride: int
    target_stride: int
    word: int
    word_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.rows * self.row_words * WORD

    @property
    def wide(self) -> bool:
        """Whether every row can be moved in 16-byte accesses."""
        return (self.source | self.target | self.source_stride | self.target_stride | self.row_words * WORD) % 16 == 0


@dataclass(frozen=True, slots=True)
class Placed:
    """One side of a copy: the byte address of its first element, and its strides in elements."""

    address: int
    strides: Shape


def segments_of(source: Placed, target: Placed, box: Box, full: Shape, itemsize: int) -> list[Segment] | None:
    """Express a copy as segments.

    Args:
        source: The reading side.
        target: The writing side.
        box: Which elements of the checkpoint tensor.
        full: The checkpoint tensor's shape.
        itemsize: Bytes of an element, the same on both sides.

    Returns:
        The segments in row-major order; None if the copy is not made of whole words.
    """
    place = contiguous_strides(full)
    first = sum(i * s for i, s in zip(box.start, place, strict=True))
    dims = _merged(box.shape, (source.strides, target.strides, place))
    if not dims:
        dims = [(1, (1, 1, 1))]
    count, unit = dims[-1]
    lanes = WORD // itemsize
    if unit != (1, 1, 1) or count % lanes or first % lanes:
        return None
    rows, spacing = dims[-2] if len(dims) > 1 else (1, (0, 0, 0))
    outer = dims[:-2]
    total = 1
    for extent, _ in outer:
        total *= extent
    spacings = [s for _, strides in [(rows, spacing), *outer] for s in strides]
    if total > MAX_SEGMENTS or any(s % lanes for s in spacings) or (source.address | target.address) % WORD:
        return None
    return [
        Segment(
            source.address + a * itemsize,
            target.address + b * itemsize,
            rows,
            count // lanes,
            spacing[0] * itemsize,
            spacing[1] * itemsize,
            (first + c) // lanes,
            spacing[2] // lanes,
        )
        for a, b, c in _offsets(outer)
    ]


def _merged(shape: Shape, strides: Sequence[Shape]) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions as (extent, one stride a side), with those joined that are dense on every side."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for extent, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if extent == 1:
            continue
        if dims and all(outer == step * extent for outer, step in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * extent, steps)
        else:
            dims.append((extent, steps))
    return dims


def _offsets(dims: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, int, int]]:
    for index in product(*(range(extent) for extent, _ in dims)):
        moved = [sum(i * strides[side] for i, (_, strides) in zip(index, dims, strict=True)) for side in range(3)]
        yield moved[0], moved[1], moved[2]
