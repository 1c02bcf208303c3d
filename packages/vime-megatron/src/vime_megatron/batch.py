"""Training sequences, and how a global batch becomes packed micro-batches.

Every rank is handed the same global batch and computes the same plan, so nothing is sent around: sequences are dealt to
data-parallel ranks and to micro-batches by their cost, largest first, to the place that has least so far. All ranks get
the same number of micro-batches (a rank that has fewer runs an empty one), because expert- and pipeline-parallel
communication counts on it.

The layout never changes the result: a loss returns sums whose weights already hold the global normaliser, and the
trainer only ever adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vime_megatron.errors import BatchError

TokenLoss = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""``(logprobs_t, entropy_t, fields_t) -> (loss, metrics)``, called once per packed micro-batch.

The tensors are flat over the micro-batch's trained tokens, in the order of its sequences; float32. ``loss`` is a scalar
SUM over them whose per-token weights already contain the global normaliser; ``metrics`` are scalar sums likewise. The
trainer adds both over micro-batches and data-parallel ranks. Ranks that share a row (tensor and context parallelism)
call it alike, each on the tokens of whole sequences.
"""

WEIGHT_FIELD = "weight"


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One token sequence with per-token values.

    ``fields[name][i]`` belongs to the prediction OF ``tokens[i]``; index 0 is predicted by nothing and is never trained
    on. When a field named ``weight`` is present, tokens whose weight is 0 are skipped before the vocabulary projection:
    the loss does not see them.

    Attributes:
        tokens: Token ids, int64 ``[S]`` on the CPU.
        fields: Per-token values by name, float ``[S]`` each; the same names in every sequence of a batch.
    """

    tokens: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check shapes and types.

        Raises:
            BatchError: The tokens are not a non-empty int64 vector, or a field has another length.
        """
        if self.tokens.dim() != 1 or self.tokens.numel() == 0 or self.tokens.dtype != torch.int64:
            seen = f"shape {tuple(self.tokens.shape)}, {self.tokens.dtype}"
            raise BatchError("bad tokens in a TrainSequence", seen=seen, expected="a non-empty int64 vector")
        for name, values in self.fields.items():
            if values.shape != self.tokens.shape:
                seen, expected = f"shape {tuple(values.shape)}", f"one value per token, {tuple(self.tokens.shape)}"
                raise BatchError("bad field in a TrainSequence", where=f"field {name!r}", seen=seen, expected=expected)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.tokens.numel()


def check_batch(sequences: Sequence[TrainSequence], *, max_length: int, vocab_size: int) -> None:
    """Refuse a global batch that cannot be trained on, naming the sequence.

    Args:
        sequences: The global batch.
        max_length: Longest sequence accepted, in tokens.
        vocab_size: Number of token ids the model knows.

    Raises:
        BatchError: The batch is empty, a sequence is too long, has a token id out of range or other fields.
    """
    if not sequences:
        raise BatchError("empty batch", expected="at least one sequence")
    names = set(sequences[0].fields)
    for index, sequence in enumerate(sequences):
        where = f"sequence {index} of {len(sequences)}"
        if len(sequence) > max_length:
            raise BatchError(
                "sequence longer than the limit",
                where=where,
                seen=f"{len(sequence)} tokens",
                expected=f"at most {max_length}",
                fix="drop or truncate it, or raise max_sequence_length",
            )
        if set(sequence.fields) != names:
            seen, expected = repr(sorted(sequence.fields)), f"those of sequence 0: {sorted(names)!r}"
            raise BatchError("fields differ within a batch", where=where, seen=seen, expected=expected)
    tokens_t = torch.cat([sequence.tokens for sequence in sequences])
    outside_t = (tokens_t < 0) | (tokens_t >= vocab_size)
    if bool(outside_t.any()):
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        index = int(torch.arange(len(sequences)).repeat_interleave(lengths)[outside_t][0])
        low, high = sequences[index].tokens.aminmax()
        raise BatchError(
            "token id out of the vocabulary",
            where=f"sequence {index} of {len(sequences)}",
            seen=f"{int(low)} to {int(high)}",
            expected=f"0 to {vocab_size - 1}",
        )


@dataclass(frozen=True)
class BatchPlan:
    """Which sequences each data-parallel rank runs, in which micro-batch.

    Attributes:
        microbatches: ``microbatches[rank][k]`` lists indices into the global batch; may be empty. Every rank has the
            same number of them.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        """Micro-batches per rank."""
        return len(self.microbatches[0])


def plan_batch(
    lengths: Sequence[int], *, ranks: int, max_tokens: int, cost: Callable[[int], float] | None = None
) -> BatchPlan:
    """Deal sequences to ranks and micro-batches, deterministically.

    The number of micro-batches is the smallest that a longest-first packing under the budget needs, rounded up to the
    same number on each rank. A sequence longer than the budget has a micro-batch of its own.

    Args:
        lengths: Token count of each sequence of the global batch.
        ranks: Data-parallel ranks.
        max_tokens: Token budget of a micro-batch.
        cost: Cost of a sequence of a given length, for the balance between ranks; default: its length.

    Returns:
        The plan; every index appears exactly once.
    """
    weigh = cost or float
    order = sorted(range(len(lengths)), key=lambda i: (-weigh(lengths[i]), i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in order:
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += weigh(lengths[index])
    bins = [_pack(share, lengths, max_tokens) for share in shares]
    count = max(1, *(len(mine) for mine in bins))
    padded = [mine + [()] * (count - len(mine)) for mine in bins]
    return BatchPlan(tuple(tuple(mine) for mine in padded))


def _pack(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """First-fit decreasing: near the least number of bins, and within each bin the order of the global batch."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(share, key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        for k, free in enumerate(room):
            if size <= free:
                bins[k].append(index)
                room[k] -= size
                break
        else:
            bins.append([index])
            room.append(max_tokens - size)
    return [tuple(sorted(mine)) for mine in bins]
