"""Sums over the sequences inside a packed micro-batch.

A trainer hands a loss the trained tokens of several sequences end to end. The field ``sequence`` tells them apart: it
holds another number for every sequence of the global batch (:func:`vime_grpo.batch.build_batch` makes it), so where it
changes, the next sequence begins. A sequence is never cut in two by packing, so its sum is whole in its micro-batch and
does not depend on what else is in there. (Context parallelism cuts it; vime-megatron puts a row's log-probabilities
together before a loss sees them.)

Shapes: ``t`` tokens, flat over a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which tokens belong together.

    Attributes:
        index_t: Number of each token's sequence within the micro-batch ``[t]``, int64, from 0.
        trained_t: Which tokens are trained on ``[t]``, bool; only they are counted.
    """

    index_t: Tensor
    trained_t: Tensor

    @classmethod
    def of(cls, sequence_t: Tensor, trained_t: Tensor) -> Segments:
        """Find the sequences.

        Args:
            sequence_t: Another value for every sequence ``[t]``; equal within one, tokens of one are adjacent.
            trained_t: Which tokens are trained on ``[t]``, bool.
        """
        begins_t = torch.ones_like(sequence_t, dtype=torch.int64)
        begins_t[1:] = sequence_t[1:] != sequence_t[:-1]
        return cls(begins_t.cumsum(0) - 1, trained_t)

    def sum(self, values_t: Tensor) -> Tensor:
        """Return, at every token, the sum over the trained tokens of its sequence ``[t]``; gradients pass.

        Added in float64: on a GPU the order of the additions is not fixed, and float32 would show it.
        """
        wide_t = torch.where(self.trained_t, values_t, 0.0).double()
        # As long as the tokens, though fewer sequences are enough: their number would have to be fetched from the GPU.
        sums_t = torch.zeros_like(wide_t).index_add(0, self.index_t, wide_t)
        return sums_t[self.index_t].to(values_t.dtype)

    def mean(self, values_t: Tensor) -> Tensor:
        """Return, at every token, the mean over the trained tokens of its sequence ``[t]``; 0 where there are none."""
        count_t = self.sum(self.trained_t.to(values_t.dtype))
        return self.sum(values_t) / count_t.clamp(min=1)
