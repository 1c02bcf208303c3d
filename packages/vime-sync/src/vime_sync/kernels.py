"""One Triton kernel that moves a whole plan and digests it on the way.

A model is a few hundred segments (see `vime_sync.segments`), from a norm of a few kilobytes to an embedding of a
gigabyte. A launch for each would leave the device idle between them, so one launch moves them all: segments are cut
into tiles of equal size, a program is one tile, and it finds its segment by a binary search in a table that stays on
the device (some ten kilobytes, built once a connection). The digest costs two multiply-adds and a mix for each word
that is in a register anyway.

Sums meet in two 64-bit atomic additions a tile. Addition modulo 2**64 is associative, so their order does not matter
and the digest is the one that `vime_sync.digest` defines, bit for bit.

Runs on NVIDIA and (unconfirmed on hardware) AMD devices, and on a CPU in Triton's interpreter, which the tests use.

Shape legend: ``_w`` a vector over the words of a block; table columns are [segments].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vime_sync.digest import GOLDEN, MIX, DigestMode, signed
from vime_sync.segments import Segment

_GOLDEN = tl.constexpr(GOLDEN)
_MIX = tl.constexpr(MIX)
_COLUMNS = tl.constexpr(10)
#: A hint for every so many tiles.
_HINT_LOG2 = tl.constexpr(6)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a tile is cut.

    Attributes:
        block: Words that a program moves at once; a power of two.
        blocks: How many times in a row.
        warps: Warps a program.
    """

    block: int
    blocks: int
    warps: int

    @property
    def tile(self) -> int:
        """Words of a tile."""
        return self.block * self.blocks


#: The best of sweeps on an H200 (benchmarks/README.md). A copy alone wants short tiles: more of them in flight, and the
#: last wave is over sooner. A digest wants longer ones, because every tile ends in a reduction over its block and two
#: atomic additions, and four words a thread: 46 registers let twice as many warps run as eight words with 96 did.
COPYING = Tuning(block=1024, blocks=2, warps=8)
DIGESTING = Tuning(block=512, blocks=8, warps=4)


@triton.jit
def _row_of(table, hints, tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Find the segment that a tile belongs to: the hints bound it, bisection of the first tiles does the rest.

    Bisecting the whole table would be ten loads in a row that wait for each other, before the first byte moves. Large
    segments span many hints, so that nearly every tile is found by two loads that do not.
    """
    low = tl.load(hints + (tile >> _HINT_LOG2))
    high = tl.load(hints + (tile >> _HINT_LOG2) + 1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        ahead = tl.load(table + middle) <= tile
        low = tl.where(ahead, middle, low)
        high = tl.where(ahead, high, middle)
    return low


@triton.jit
def _mixed(word_w, seed):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Mix a word's global position with the tensor's seed (the first rounds of splitmix64)."""
    z_w = (word_w + 1).to(tl.uint64) * _GOLDEN + seed
    z_w = (z_w ^ (z_w >> 30)) * _MIX
    return z_w ^ (z_w >> 27)


@triton.jit  # type: ignore[untyped-decorator]
def _looked_at(first, phase, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Whether a sampled digest looks at any of some words in a row: whether a multiple of 16 is among their blocks."""
    low = (first >> 10) + phase
    return ((low + 15) >> 4) <= (((first + (WORDS - 1)) >> 10) + phase) >> 4


@triton.jit
def _spacing(row, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """How the rows of a strided segment lie: words of a row, and from one row to the next on each side."""
    return (
        tl.load(row + 6 * count),
        tl.load(row + 7 * count),
        tl.load(row + 8 * count),
        tl.load(row + 9 * count),
    )


@triton.jit(do_not_specialize=["count", "phase"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    table,  # noqa: ANN001 (Triton compiles annotations; these are run-time arguments)
    sums,  # noqa: ANN001
    count,  # noqa: ANN001
    phase,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803 (Triton's convention for compile-time constants)
    BLOCKS: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803
    DIGEST: tl.constexpr,  # noqa: N803
    SAMPLED: tl.constexpr,  # noqa: N803
    STRIDED: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
) -> None:
    low = _row_of(table, table + _COLUMNS * count, tl.program_id(0).to(tl.int64))
    row = table + low
    begin = (tl.program_id(0) - tl.load(row)) * (BLOCKS * BLOCK)
    source = tl.load(row + count).to(tl.pointer_type(tl.uint64))
    target = tl.load(row + 2 * count).to(tl.pointer_type(tl.uint64))
    # From here on a program counts in 32 bits from its first word: fewer registers, so more programs at once.
    left = tl.minimum(tl.load(row + 3 * count) - begin, BLOCKS * BLOCK).to(tl.int32)
    first_word = tl.load(row + 4 * count)
    seed = tl.load(row + 5 * count).to(tl.uint64)
    if STRIDED:
        row_words, source_stride, target_stride, word_stride = _spacing(row, count)
    else:
        source, target, first_word = source + begin, target + begin, first_word + begin
    if WIDE:
        source, target, left = tl.multiple_of(source, 16), tl.multiple_of(target, 16), tl.multiple_of(left, 2)
    first_w, second_w = tl.zeros((BLOCK,), tl.uint64), tl.zeros((BLOCK,), tl.uint64)
    touched = 0
    for block in range(BLOCKS):
        index_w = block * BLOCK + tl.arange(0, BLOCK)
        inside_w = index_w < left
        source_w, target_w, word_w = index_w, index_w, index_w
        if STRIDED:
            at_w = (begin + index_w) // row_words
            column_w = begin + index_w - at_w * row_words
            source_w, target_w = at_w * source_stride + column_w, at_w * target_stride + column_w
            word_w = at_w * word_stride + column_w
        value_w = tl.load(source + source_w, mask=inside_w, other=0)
        if COPY:
            tl.store(target + target_w, value_w, mask=inside_w)
        if DIGEST:
            word_w = first_word + word_w
            wanted = True
            if SAMPLED and not STRIDED:  # only here it is a branch of the kernel: elsewhere it costs registers
                wanted = _looked_at(first_word + block * BLOCK, phase, BLOCK)
            if wanted:
                z_w = _mixed(word_w, seed)
                if SAMPLED:
                    value_w = tl.where((((word_w >> 10) + phase) & 15) == 0, value_w, 0)
                first_w += value_w * (z_w | 1)
                second_w += ((value_w << 32) | (value_w >> 32)) * (((z_w << 32) | (z_w >> 32)) | 1)
                touched += 1
    if DIGEST and touched > 0:
        tl.atomic_add(sums + 2 * low, tl.sum(first_w, 0).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums + 2 * low + 1, tl.sum(second_w, 0).to(tl.int64), sem="relaxed")


class SegmentTable:
    """Segments of one kind (dense or strided), on the device, ready to be moved any number of times."""

    def __init__(
        self,
        segments: Sequence[Segment],
        seeds: Sequence[int],
        device: torch.device,
        sums: torch.Tensor,
        *,
        tuning: Tuning | None = None,
    ) -> None:
        """Write the table, once for each way in which tiles are cut.

        Args:
            segments: What to move; the memory must outlive the table.
            seeds: The digest seed of each segment's checkpoint tensor.
            device: Where the kernel runs.
            sums: int64 [segments, 2] there: what digests are added to. Whoever made it sets it to zero.
            tuning: How tiles are cut, if not as `COPYING` and `DIGESTING` say.
        """
        self.count, self._tuning = len(segments), tuning
        self._strided = any(s.rows > 1 for s in segments)
        self._wide = all(s.wide for s in segments)
        cuts = {tuning} if tuning else {COPYING, DIGESTING}
        self._tables = {cut: _table(segments, seeds, cut, device) for cut in cuts}
        self._sums = sums

    def move(self, *, write: bool, digest: DigestMode, phase: int = 0) -> None:
        """Queue the kernel on the current stream of the current device, which must be the table's.

        Args:
            write: Copy; otherwise only read (and digest).
            digest: How much to digest.
            phase: The sampling phase.
        """
        self._launch(write=write, digest=digest, phase=phase, run=True)

    def compile(self, *, write: bool, digest: DigestMode) -> None:
        """Compile the variant that `move` would use, without running it: an engine must not wait for it in a pause."""
        self._launch(write=write, digest=digest, phase=0, run=False)

    def _launch(self, *, write: bool, digest: DigestMode, phase: int, run: bool) -> None:
        cut = self._tuning or (COPYING if digest == "off" else DIGESTING)
        table, tiles = self._tables[cut]
        launch: Any = _move[(tiles if run else 0,)]  # Triton compiles for a grid of no programs, and launches nothing
        launch(
            table,
            self._sums,
            self.count,
            phase,
            BLOCK=cut.block,
            BLOCKS=cut.blocks,
            COPY=write,
            DIGEST=digest != "off",
            SAMPLED=digest == "sampled",
            STRIDED=self._strided,
            WIDE=self._wide,
            num_warps=cut.warps,
        )


def _table(
    segments: Sequence[Segment], seeds: Sequence[int], cut: Tuning, device: torch.device
) -> tuple[torch.Tensor, int]:
    """What the kernel reads, and how many tiles there are.

    int64: the columns [_COLUMNS, segments], then the hints: the segment of every 64th tile, and the last segment.
    """
    columns: list[list[int]] = [[] for _ in range(_COLUMNS.value)]
    tiles = 0
    for segment, seed in zip(segments, seeds, strict=True):
        words = segment.rows * segment.row_words
        values = (tiles, segment.source, segment.target, words, segment.word, signed(seed), segment.row_words)
        strides = (segment.source_stride // 8, segment.target_stride // 8, segment.word_stride)
        for column, value in zip(columns, (*values, *strides), strict=True):
            column.append(value)
        tiles += -(-words // cut.tile)
    asked = torch.arange(0, tiles, 1 << _HINT_LOG2.value)
    hints = torch.searchsorted(torch.tensor(columns[0]), asked, right=True) - 1
    last = torch.tensor([len(segments) - 1])
    return torch.cat([torch.tensor(columns, dtype=torch.int64).flatten(), hints, last]).to(device), tiles
