"""Many documents in one row: the tokens of a micro-batch and what keeps its documents apart.

Documents are laid end to end without padding. Three things must not leak across a border: positions (each document
counts from 0), rotary angles (taken at those positions) and attention (a core attention is given the borders).

For a core attention that knows no borders the documents are also dealt into groups of similar length, each padded to
its longest: under a causal mask what is right of a document is never seen by it, so padding on the right needs no mask
tensor. A padding slot repeats the document's own last token, so that not even a NaN can cross.

Under context parallelism a rank is given a slice of the row's tokens, with their positions and angles; the borders and
groups stay those of the whole row, which attention sees (:mod:`vime_megatron.model.context`).

Suffixes: ``t`` tokens of the row (or of a rank's slice), ``d`` half a head, ``n`` documents of a group, ``l`` its
longest length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from vime_megatron.families.shape import Llama3Scaling

_GROUP_SPREAD = 0.7  # a group's shortest document is at least this share of its longest


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """A row of documents on the device.

    Attributes:
        tokens_1t: Token ids ``[1, t]``.
        positions_t: Position of each token in its document ``[t]``.
        cos_td: Cosines of the rotary angles, float32 ``[t, d]``.
        sin_td: Sines, likewise.
        borders: Start of each document and the end of the last, int32 ``[documents + 1]``.
        lengths: Length of each document of the whole row.
    """

    tokens_1t: Tensor
    positions_t: Tensor
    cos_td: Tensor
    sin_td: Tensor
    borders: Tensor
    lengths: tuple[int, ...]

    qkv_format: None = None  # Megatron's layers ask; "no special format" keeps them out of it

    @cached_property
    def longest(self) -> int:
        """Longest document."""
        return max(self.lengths)

    @cached_property
    def uniform(self) -> bool:
        """All documents have one length, so that the row is a batch as it lies."""
        return min(self.lengths) == self.longest

    @cached_property
    def groups(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Row indices ``[n, l]`` of each padded group; and for each token, its place among all the slots ``[t]``.

        They are made when a core attention first asks: most never do, and for hundreds of documents it takes a while.
        """
        groups, ungroup_t = _group(self.lengths)
        device = self.borders.device
        return tuple(upload(group, device) for group in groups), upload(ungroup_t, device)


def pack(documents: Sequence[Tensor], *, inverse_frequencies: Tensor, device: torch.device) -> PackedTokens:
    """Lay documents end to end.

    Args:
        documents: Token ids of each, int64 ``[length]``, on the CPU.
        inverse_frequencies: Rotary frequencies, float32 ``[d]``.
        device: Where the result goes.

    Returns:
        The row.
    """
    lengths = [document.numel() for document in documents]
    starts = [0, *accumulate(lengths)]
    # One subtraction, not a count for each document: there may be hundreds, and the device waits for the first row.
    positions_t = torch.arange(starts[-1]) - torch.tensor(starts[:-1]).repeat_interleave(torch.tensor(lengths))
    positions_t = upload(positions_t, device)
    angles_td = positions_t.to(torch.float32)[:, None] * upload(inverse_frequencies, device)[None, :]
    return PackedTokens(
        tokens_1t=upload(torch.cat(list(documents))[None], device),
        positions_t=positions_t,
        cos_td=angles_td.cos(),
        sin_td=angles_td.sin(),
        borders=upload(torch.tensor(starts, dtype=torch.int32), device),
        lengths=tuple(lengths),
    )


def slice_row(row: PackedTokens, rank: int, ranks: int) -> PackedTokens:
    """Take one context-parallel rank's tokens of a row.

    Args:
        row: The whole row; its length is a multiple of ``ranks``.
        rank: Which slice.
        ranks: Number of slices.

    Returns:
        The row with the tokens, positions and angles of the slice; what attention needs is left whole.
    """
    each = row.tokens_1t.shape[1] // ranks
    own = slice(rank * each, (rank + 1) * each)
    return replace(
        row,
        tokens_1t=row.tokens_1t[:, own],
        positions_t=row.positions_t[own],
        cos_td=row.cos_td[own],
        sin_td=row.sin_td[own],
    )


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for it.

    From ordinary host memory a copy first waits for all that is queued on the device, so that the next micro-batch
    would only be launched when the last one has finished; from pinned memory it queues up.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None = None) -> Tensor:
    """Return ``theta^(-2i/head_dim)``, float32 ``[head_dim / 2]`` (RoFormer, arXiv 2104.09864).

    Args:
        head_dim: Width of a head.
        theta: Rotary base.
        scaling: Slows the long waves, where the model was made so.

    Returns:
        Radians per position.
    """
    plain_d = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain_d
    turns_d = scaling.positions * plain_d / (2 * math.pi)
    kept_d = ((turns_d - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return kept_d * plain_d + (1.0 - kept_d) * plain_d / scaling.factor


def _group(lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Deal documents into padded groups; see the module's text."""
    starts = [0, *accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    members: list[list[int]] = []
    for index in order:
        if members and lengths[index] >= _GROUP_SPREAD * lengths[members[-1][0]]:
            members[-1].append(index)
        else:
            members.append([index])
    groups: list[Tensor] = []
    ungroup_t = torch.empty(starts[-1], dtype=torch.int64)
    base = 0
    for group in members:
        width = lengths[group[0]]
        first = torch.tensor([starts[i] for i in group])
        last = torch.tensor([starts[i] + lengths[i] - 1 for i in group])
        rows = torch.minimum(first[:, None] + torch.arange(width)[None, :], last[:, None])
        groups.append(rows)
        for slot, index in enumerate(group):
            places = torch.arange(lengths[index]) + base + slot * width
            ungroup_t[starts[index] : starts[index] + lengths[index]] = places
        base += rows.numel()
    return groups, ungroup_t
