"""Qwen3 with experts in every layer, none of them shared (Qwen3 technical report, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_megatron.errors import ModelError
from vime_megatron.families.shape import ModelShape, decoder_shape, require

ARCHITECTURE = "Qwen3MoeForCausalLM"


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the model's sizes.

    Args:
        config: Parsed ``config.json``.

    Returns:
        The shape.

    Raises:
        ModelError: A setting has a value that this family does not support.
    """
    require(config, {"attention_bias": False, "decoder_sparse_step": 1})
    if config.get("mlp_only_layers"):
        raise ModelError(
            "unsupported model settings",
            where="config.json",
            seen=f"mlp_only_layers={config['mlp_only_layers']!r}",
            expected="experts in every layer",
        )
    return decoder_shape(
        config,
        ARCHITECTURE,
        ffn=int(config["moe_intermediate_size"]),
        experts=int(config.get("num_experts") or config["num_local_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        normalise_experts=bool(config.get("norm_topk_prob", False)),
        qk_norm=True,
    )
