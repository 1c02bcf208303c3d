"""Megatron's linears over tensor-parallel ranks, as this model uses them: one splits rows, the next splits columns.

Between the two each rank has its own share of the width, and nothing is communicated; the second adds the ranks'
results up.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig


def into_shares(
    config: TransformerConfig, width: int, *, bias: bool = False, tp_group: Any = None
) -> ColumnParallelLinear:
    """Build a projection of the residual stream of which each rank computes a share.

    Args:
        config: Megatron's configuration.
        width: Of the result, all ranks together.
        bias: Add one.
        tp_group: Tensor-parallel group; ``None`` takes Megatron's current one.

    Returns:
        ``[s, 1, m]`` to ``[t, 1, width / ranks]``, with the tokens gathered under sequence parallelism.
    """
    return ColumnParallelLinear(
        config.hidden_size,
        width,
        config=config,
        init_method=config.init_method,
        bias=bias,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp_group,
    )


def out_of_shares(config: TransformerConfig, width: int, *, tp_group: Any = None) -> RowParallelLinear:
    """Build the projection back to the residual stream.

    Args:
        config: Megatron's configuration.
        width: Of what comes in, all ranks together.
        tp_group: Tensor-parallel group; ``None`` takes Megatron's current one.

    Returns:
        ``[t, 1, width / ranks]`` to ``[s, 1, m]``, with the tokens shared out under sequence parallelism.
    """
    return RowParallelLinear(
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_group=tp_group,
    )
