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
from itertools import accumulate, pairwise

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
    lengths = [document.numel() for document in documents]
    fields = {
        name: torch.cat([batch[i].fields[name] for i in indices])
        for name in (batch[indices[0]].fields if indices else ())
    }
    tokens_t = torch.cat([torch.empty(0, dtype=torch.int64), *documents])
    kept_k, spans = _predicted(lengths, None if every_token else fields.get(WEIGHT_FIELD))
    filler = -len(tokens_t) % multiple if documents else multiple
    if filler:
        documents.append(torch.zeros(filler, dtype=torch.int64))
    rank, ranks = context
    row = pack(documents, inverse_frequencies=inverse_frequencies, device=device)
    each = row.tokens_1t.shape[1] // ranks
    sources_k = kept_k - 1
    shares = torch.bincount(sources_k // each, minlength=ranks).tolist()
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    return MicroBatch(
        row=slice_row(row, rank, ranks) if ranks > 1 else row,
        sources_c=upload(sources_k[own] - rank * each, device),
        targets_c=upload(tokens_t[kept_k][own], device),
        shares=tuple(shares),
        fields_k={name: upload(value_t[kept_k].to(torch.float32), device) for name, value_t in fields.items()},
        sequences=indices,
        spans=spans,
    )


def _predicted(lengths: Sequence[int], weight_t: Tensor | None) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Find the tokens that are predicted: all but the first of each document, and none of weight 0.

    Args:
        lengths: Of the documents, which lie end to end.
        weight_t: Weights of their tokens, or None to leave none out for its weight.

    Returns:
        Their positions ``[k]``, and where in that list each document's begin and end.
    """
    ends = torch.tensor([0, *accumulate(lengths)])
    predicted_t = torch.ones(int(ends[-1]), dtype=torch.bool)
    predicted_t[ends[:-1]] = False
    if weight_t is not None:
        predicted_t &= weight_t != 0
    counts = torch.cat((torch.zeros(1, dtype=torch.int64), predicted_t.cumsum(0)))[ends].tolist()
    return predicted_t.nonzero()[:, 0], tuple(pairwise(counts))
