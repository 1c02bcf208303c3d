"""Self-attention with its projections stacked as vLLM stacks them: ``[q; k; v]``.

Megatron's own module interleaves query, key and value heads group by group. Stacked rows hold the same numbers, but an
inference engine can then use this parameter in place, with no copy. Everything else is Megatron's: the column- and
row-parallel linears with their communication.

Suffixes: ``s`` tokens of this rank (all of them without sequence parallelism), ``t`` tokens of the row, ``h`` query
heads and ``g`` key/value heads of this rank, ``e`` width of a head, ``m`` width of the model.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime_megatron.kernels import PLAIN, Kernels
from vime_megatron.kernels.plain import HeadLayout
from vime_megatron.model.core_attention import CoreAttention
from vime_megatron.model.linears import into_shares, out_of_shares
from vime_megatron.model.norm import RMSNorm
from vime_megatron.model.packing import PackedTokens
from vime_megatron.model.recompute import accept


class StackedSelfAttention(MegatronModule):
    """Grouped-query self-attention over a packed row.

    Args:
        config: Megatron's configuration.
        layer_number: 1-based layer number, as Megatron counts.
        core_attention: The attention inside documents.
        qk_norm: Norm queries and keys per head.
        pg_collection: Megatron's process groups; ``tp`` is used.

    Attributes:
        kernels: What splits, norms and rotates.
    """

    kernels: Kernels = PLAIN

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        core_attention: CoreAttention,
        qk_norm: bool,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        """Create the two projections and the head norms."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.core_attention = core_attention
        self.head_dim = int(config.kv_channels)
        ranks = config.tensor_model_parallel_size
        self.heads = HeadLayout(
            heads=config.num_attention_heads // ranks,
            groups=config.num_query_groups // ranks,
            width=self.head_dim,
            eps=config.layernorm_epsilon,
        )
        tp_group = getattr(pg_collection, "tp", None)
        stacked = (config.num_attention_heads + 2 * config.num_query_groups) * self.head_dim
        self.linear_qkv = into_shares(config, stacked, bias=config.add_qkv_bias, tp_group=tp_group)
        self.linear_proj = out_of_shares(config, config.num_attention_heads * self.head_dim, tp_group=tp_group)
        self.q_layernorm = RMSNorm(config, self.head_dim, config.layernorm_epsilon) if qk_norm else None
        self.k_layernorm = RMSNorm(config, self.head_dim, config.layernorm_epsilon) if qk_norm else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[Tensor, None]:
        """Attend.

        Args:
            hidden_states: ``[s, 1, m]``.
            attention_mask: Unused: the row knows its borders.
            packed_seq_params: The row.

        Returns:
            ``[s, 1, m]``, and no bias.
        """
        with accept(hidden_states):
            qkv_t1x, _bias = self.linear_qkv(hidden_states)
        q_the, k_tge, v_tge = self.kernels.query_key_value(
            qkv_t1x.squeeze(1),
            None if self.q_layernorm is None else self.q_layernorm.weight,
            None if self.k_layernorm is None else self.k_layernorm.weight,
            packed_seq_params.cos_td,
            packed_seq_params.sin_td,
            self.heads,
        )
        out_the = self.core_attention(q_the, k_tge, v_tge, packed_seq_params)
        output, _bias = self.linear_proj(out_the.flatten(1).unsqueeze(1))
        return output, None
