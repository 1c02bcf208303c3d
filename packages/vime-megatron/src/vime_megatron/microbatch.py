"""From sequences to what the model and the loss are given.

A row of ``t`` tokens predicts ``t - documents`` of them: position ``p`` predicts ``p + 1`` unless a document ends
there. Of these, only tokens whose ``weight`` is not 0 are kept when the batch has such a field; their positions,
targets and fields are flat vectors of ``k`` values, in the order of the sequences.

Context-parallel ranks each run a slice of the row and predict what their positions predict, ``c`` of the ``k``; the
fields and spans stay those of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vime_megatron.batch import WEIGHT_FIELD, TrainSequence
from vime_megatron.model.packing import PackedTokens, pack, slice_row, upload


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed row and the predictions asked of it.

    Attributes:
        row: The documents on the device, or this context-parallel rank's slice of them.
        sources_c: Positions of the slice that predict.
        targets_c: Token ids that they predict.
        shares: Number of predictions of each context-parallel rank; they sum to ``k``.
        fields_k: The targets' values by field name, float32, of the whole row.
        sequences: Global indices of the documents; empty for a row that only keeps the ranks in step.
        spans: For each document, the range of its predictions in the flat vectors.
    """

    row: PackedTokens
    sources_c: Tensor
    targets_c: Tensor
    shares: tuple[int, ...]
    fields_k: dict[str, Tensor]
    sequences: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def idle(self) -> bool:
        """The row stands for nothing."""
        return not self.sequences


def build_microbatch(
    batch: Sequence[TrainSequence],
    indices: tuple[int, ...],
    *,
    inverse_frequencies: Tensor,
    device: torch.device,
    multiple: int = 1,
    every_token: bool = False,
    context: tuple[int, int] = (0, 1),
) -> MicroBatch:
    """Pack some sequences of the global batch.

    Args:
        batch: The global batch.
        indices: Which of its sequences; none gives an idle row.
        inverse_frequencies: Rotary frequencies.
        device: Where the row goes.
        multiple: The row's length is padded to a multiple of this by a last document that predicts nothing.
        every_token: Keep predictions of weight 0 too.
        context: This rank's place among its context-parallel ranks and their number, which divides ``multiple``.

    Returns:
        The micro-batch.
    """
    documents = [batch[i].tokens for i in indices]
    sources: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    kept: list[Tensor] = []
    start = count = 0
    for i in indices:
        keep = _kept(batch[i], every_token=every_token)
        kept.append(keep)
        sources.append(keep - 1 + start)
        spans.append((count, count + keep.numel()))
        count += keep.numel()
        start += len(batch[i])
    filler = -start % multiple if documents else multiple
    if filler:
        documents.append(torch.zeros(filler, dtype=torch.int64))
    none = torch.empty(0, dtype=torch.int64)
    targets = [batch[i].tokens[keep] for i, keep in zip(indices, kept, strict=True)]
    fields = {
        name: torch.cat([batch[i].fields[name][keep] for i, keep in zip(indices, kept, strict=True)])
        for name in (batch[indices[0]].fields if indices else ())
    }
    rank, ranks = context
    row = pack(documents, inverse_frequencies=inverse_frequencies, device=device)
    each = row.tokens_1t.shape[1] // ranks
    sources_k = torch.cat([none, *sources])
    shares = torch.bincount(sources_k // each, minlength=ranks).tolist()
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    return MicroBatch(
        row=slice_row(row, rank, ranks) if ranks > 1 else row,
        sources_c=upload(sources_k[own] - rank * each, device),
        targets_c=upload(torch.cat([none, *targets])[own], device),
        shares=tuple(shares),
        fields_k={name: upload(value.to(torch.float32), device) for name, value in fields.items()},
        sequences=indices,
        spans=tuple(spans),
    )


def _kept(sequence: TrainSequence, *, every_token: bool) -> Tensor:
    """Return the positions of a sequence's tokens that are predicted."""
    keep = torch.arange(1, len(sequence))
    if WEIGHT_FIELD in sequence.fields and not every_token:
        keep = keep[sequence.fields[WEIGHT_FIELD][1:] != 0]
    return keep
