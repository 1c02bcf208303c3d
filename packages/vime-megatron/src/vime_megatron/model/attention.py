"""Self-attention with its projections stacked as vLLM stacks them: ``[q; k; v]``.

Megatron's own module interleaves query, key and value heads group by group. Stacked rows hold the same numbers, but an
inference engine can then use this parameter in place, with no copy. Everything else is Megatron's: the column- and
row-parallel linears with their communication.

Suffixes: ``s`` tokens of this rank (all of them without sequence parallelism), ``t`` tokens of the row, ``h`` query
heads and ``g`` key/value heads of this rank, ``e`` width of a head, ``m`` width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from vime_megatron.model.core_attention import CoreAttention
from vime_megatron.model.norm import RMSNorm
from vime_megatron.model.packing import PackedTokens


def rotate(x_the: Tensor, row: PackedTokens) -> Tensor:
    """Turn each pair ``(x[i], x[i + e/2])`` by its position's angle (RoFormer, arXiv 2104.09864), in float32.

    Args:
        x_the: Queries or keys ``[t, h, e]``.
        row: Holds the cosines and sines.

    Returns:
        The rotated tensor, in the type of ``x_the``.
    """
    cos, sin = row.cos_td[:, None, :], row.sin_td[:, None, :]
    left, right = x_the.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_the.dtype)


class StackedSelfAttention(MegatronModule):
    """Grouped-query self-attention over a packed row.

    Args:
        config: Megatron's configuration.
        layer_number: 1-based layer number, as Megatron counts.
        core_attention: The attention inside documents.
        qk_norm: Norm queries and keys per head.
        pg_collection: Megatron's process groups; ``tp`` is used.
    """

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
        self.heads, self.groups = config.num_attention_heads // ranks, config.num_query_groups // ranks
        tp_group = getattr(pg_collection, "tp", None)
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (config.num_attention_heads + 2 * config.num_query_groups) * self.head_dim,
            config=config,
            init_method=config.init_method,
            bias=config.add_qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=tp_group,
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=tp_group,
        )
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
        qkv_t1x, _bias = self.linear_qkv(hidden_states)
        sizes = [self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim]
        q_the, k_tge, v_tge = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv_t1x.squeeze(1).split(sizes, dim=-1))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_the, k_tge = self.q_layernorm(q_the), self.k_layernorm(k_tge)
        q_the, k_tge = rotate(q_the, packed_seq_params), rotate(k_tge, packed_seq_params)
        out_the = self.core_attention(q_the, k_tge, v_tge, packed_seq_params)
        output, _bias = self.linear_proj(out_the.flatten(1).unsqueeze(1))
        return output, None
