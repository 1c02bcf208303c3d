"""The gated feed-forward of a dense layer, rows stacked ``[gate; up]``.

Megatron's own module computes the same; this one runs the trainer's choice of kernels and can recompute the activation
in the backward pass instead of keeping it.

Suffixes: ``s`` tokens of this rank, ``m`` width of the model, ``f`` width of the feed-forward on this rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime_megatron.kernels import PLAIN, Kernels
from vime_megatron.model.linears import into_shares, out_of_shares
from vime_megatron.model.recompute import accept, instead_of


class GatedMLP(MegatronModule):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202).

    Args:
        config: Megatron's configuration.
        tp_group: Tensor-parallel group; ``None`` takes Megatron's current one.
        pg_collection: Megatron's process groups, instead.

    Attributes:
        kernels: What computes the activation.
        selective: Recompute the activation in the backward pass.
    """

    kernels: Kernels = PLAIN
    selective: bool = False

    def __init__(
        self, config: TransformerConfig, *, tp_group: Any = None, pg_collection: Any = None, **_: object
    ) -> None:
        """Create the two projections."""
        super().__init__(config=config)
        tp_group = tp_group if tp_group is not None else getattr(pg_collection, "tp", None)
        self.linear_fc1 = into_shares(config, 2 * config.ffn_hidden_size, tp_group=tp_group)
        self.linear_fc2 = out_of_shares(config, config.ffn_hidden_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Transform ``[s, 1, m]``; returns the same shape, and no bias."""
        with accept(hidden_states):
            stacked_s12f, _bias = self.linear_fc1(hidden_states)
        act_s1f = self.kernels.gated_silu(stacked_s12f)
        kept = stacked_s12f.detach()
        with instead_of(act_s1f, lambda: self.kernels.gated_silu(kept)) if self.selective else nullcontext():
            output_s1m, _bias = self.linear_fc2(act_s1f)
        return output_s1m, None
