"""A digest of weights that does not depend on how they are laid out, sharded or ordered.

Read a checkpoint tensor as the row-major little-endian bytes a HF file would hold, padded with zeros to 64-bit words
``W[0], W[1], ...``. With ``w`` and ``v`` odd 64-bit weights mixed (splitmix64) from the word's position and a seed made
from the tensor's name, the digest is the pair

    ( sum W[j] * w(j),  sum rot32(W[j]) * v(j) )   modulo 2**64

and the digest of a set of tensors is the sum of theirs. What follows from that form:

* **Additive.** Any partition of the elements over ranks gives the same total, in any order: one trainer rank, four
  tensor-parallel ones and an engine of another size all compute the same value without moving a weight.
* **Position-keyed.** A swapped row, a shifted slice or a tensor under another name changes it.
* **Linear in the bytes.** A narrow element contributes ``bits << (its place in the word)``, so a slice that starts in
  the middle of a word needs no neighbour, and the digest of a changed checkpoint is the old one plus the digest of the
  difference, which is what a sparse delta proves itself with.
* **Cheap.** Two multiply-adds a word; a copy kernel hides them behind memory traffic.

A single changed element always changes it (odd weights are invertible). Unrelated corruption of many elements slips
through with probability about 2**-112 or less. It is not a cryptographic hash: it detects faults, not adversaries.

``sampled`` keeps one block of 1024 words in 16 (chosen by position and a phase, so successive versions look at other
blocks) and costs a sixteenth.

Shape legend: tensors named ``x`` are a box of a checkpoint tensor; index tensors have the box's shape.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from vime_sync.layout import Box, Shape, contiguous_strides, whole

DigestMode = Literal["off", "sampled", "full"]
#: Many digests, uint64 [n, 2]. numpy adds them modulo 2**64, as they are defined; objects would take milliseconds.
Sums = np.ndarray[Any, np.dtype[np.uint64]]

MASK = (1 << 64) - 1
#: Multipliers of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
GOLDEN = 0x9E3779B97F4A7C15
MIX = 0xBF58476D1CE4E5B9
SAMPLE_BLOCK_LOG2 = 10
SAMPLE_EVERY = 16
_CHUNK = 1 << 21


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch can hold."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def seed_of(name: str) -> int:
    """The seed of a checkpoint tensor: the first 8 bytes of its name's BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Digest:
    """A pair of sums modulo 2**64; adding digests of disjoint parts gives the digest of the whole."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Digest) -> Digest:
        """Digest of the union of two disjoint parts."""
        return Digest((self.first + other.first) & MASK, (self.second + other.second) & MASK)

    def __str__(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read what `str` wrote.

        Raises:
            ValueError: If the text is not 32 hexadecimal digits.
        """
        if len(text) != 32:
            raise ValueError(f"not a digest: {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    @classmethod
    def from_tensor(cls, sums_2: torch.Tensor) -> Digest:
        """Read a device-side pair of int64 sums."""
        return cls.from_pair(sums_2.tolist())

    @classmethod
    def total(cls, sums: Sums) -> Digest:
        """The digest of all parts together."""
        first, second = sums.sum(axis=0, dtype=np.uint64).tolist()
        return cls(first, second)

    @classmethod
    def from_pair(cls, pair: Sequence[int]) -> Digest:
        """Read a pair of signed sums."""
        first, second = pair
        return cls(first & MASK, second & MASK)


def _lsr(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's shift of int64 keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _swap_halves(z: torch.Tensor) -> torch.Tensor:
    return (z << 32) | _lsr(z, 32)


def digest_box(
    x: torch.Tensor, box: Box, shape: Shape, name: str, *, mode: DigestMode = "full", phase: int = 0
) -> torch.Tensor:
    """Digest a box of a checkpoint tensor.

    Args:
        x: The box's elements, any strides.
        box: Where they are in the checkpoint tensor.
        shape: The checkpoint tensor's shape.
        name: Its name.
        mode: ``"full"`` or ``"sampled"`` (``"off"`` gives zeros).
        phase: Which blocks ``"sampled"`` looks at; the version, by convention.

    Returns:
        int64 [2] on the device of `x`: the two sums. Read it with `Digest.from_tensor`.
    """
    total_2 = torch.zeros(2, dtype=torch.int64, device=x.device)
    if mode == "off" or box.volume == 0:
        return total_2
    if not shape:
        x, box, shape = x.reshape(1), whole((1,)), (1,)
    x, box, shape, lanes = _as_words(x, box, shape)
    seed = signed(seed_of(name))
    for part, at in _chunks(x, box):
        total_2 += _sums(part, at, shape, lanes, seed, None if mode == "full" else phase)
    return total_2


def digest_tensor(x: torch.Tensor, name: str, *, mode: DigestMode = "full", phase: int = 0) -> Digest:
    """Digest a whole checkpoint tensor."""
    shape = tuple(x.shape)
    return Digest.from_tensor(digest_box(x, whole(shape), shape, name, mode=mode, phase=phase))


def _as_words(x: torch.Tensor, box: Box, shape: Shape) -> tuple[torch.Tensor, Box, Shape, int]:
    """Reinterpret aligned rows as 64-bit words, otherwise elements as unsigned integers; the number of lanes a word."""
    lanes = 8 // x.element_size()
    aligned = lanes == 1 or (
        x.stride(-1) == 1
        and all(s % lanes == 0 for s in x.stride()[:-1])
        and all(v % lanes == 0 for v in (x.shape[-1], box.start[-1], shape[-1]))
        and x.data_ptr() % 8 == 0
    )
    if not aligned:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        return x.view(width), box, shape, lanes
    start = (*box.start[:-1], box.start[-1] // lanes)
    extent = (*box.shape[:-1], box.shape[-1] // lanes)
    return x.view(torch.int64), Box(start, extent), (*shape[:-1], shape[-1] // lanes), 1


def _chunks(x: torch.Tensor, box: Box) -> list[tuple[torch.Tensor, Box]]:
    """Split along the first dimension that allows it, so that temporaries stay small."""
    rows = x.shape[0]
    step = max(1, _CHUNK // max(1, math.prod(x.shape[1:])))
    return [
        (x[at : at + step], Box((box.start[0] + at, *box.start[1:]), (min(step, rows - at), *box.shape[1:])))
        for at in range(0, rows, step)
    ]


def _sums(x: torch.Tensor, box: Box, shape: Shape, lanes: int, seed: int, phase: int | None) -> torch.Tensor:
    """The two sums over one chunk. Elements narrower than a word are shifted to their place in it."""
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, (start, extent, stride) in enumerate(zip(box.start, box.shape, contiguous_strides(shape), strict=True)):
        along = torch.arange(start, start + extent, dtype=torch.int64, device=x.device) * stride
        index = index + along.view(-1, *(1,) * (len(box.shape) - dim - 1))
    bits = x.to(torch.int64)
    if lanes == 1:
        word, rotated = index, _swap_halves(bits)
    else:
        width = 64 // lanes
        bits = bits & ((1 << width) - 1)
        lane, word = index % lanes, index // lanes
        rotated = bits << (((lane + lanes // 2) % lanes) * width)
        bits = bits << (lane * width)
    z = (word + 1) * signed(GOLDEN) + seed
    z = (z ^ _lsr(z, 30)) * signed(MIX)
    z = z ^ _lsr(z, 27)
    if phase is not None:
        kept = ((word >> SAMPLE_BLOCK_LOG2) + phase) % SAMPLE_EVERY == 0
        bits, rotated = bits * kept, rotated * kept
    return torch.stack([(bits * (z | 1)).sum(), (rotated * (_swap_halves(z) | 1)).sum()])
