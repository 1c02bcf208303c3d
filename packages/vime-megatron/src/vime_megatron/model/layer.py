"""A decoder layer around the residual stream: each addition goes with the norm that follows it.

Megatron's layer norms, runs the attention, adds, norms, runs the feed-forward and adds, each a pass of its own forward
and several backward, where autograd also adds the two gradients that meet at a norm's input. Here the norm carries the
residual along (:func:`vime_megatron.kernels.plain.add_norm`), so a fused kernel can do each meeting in one pass. The
numbers are Megatron's: there is no dropout, no bias after the projections and no cross-attention to this model.

Suffixes: ``s`` tokens of this rank, ``m`` width of the model.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from vime_megatron.model.packing import PackedTokens


class DecoderLayer(TransformerLayer):
    """Megatron's layer, built by it, with the forward pass above."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[Tensor, None]:
        """Run the layer; arguments as its attention's. Returns ``[s, 1, m]``, and no context."""
        normed_s1m, residual_s1m = self.input_layernorm.with_residual(hidden_states)
        attended_s1m, _bias = self.self_attention(normed_s1m, attention_mask, packed_seq_params=packed_seq_params)
        normed_s1m, residual_s1m = self.pre_mlp_layernorm.with_residual(residual_s1m, attended_s1m)
        output_s1m, _bias = self.mlp(normed_s1m)
        return residual_s1m + output_s1m, None
