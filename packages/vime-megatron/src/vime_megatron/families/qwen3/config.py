"""Qwen3 dense: RMS norms on queries and keys, no biases (Qwen3 technical report, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_megatron.families.shape import ModelShape, require, rope_theta

ARCHITECTURE = "Qwen3ForCausalLM"


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the model's sizes.

    Args:
        config: Parsed ``config.json``.

    Returns:
        The shape.

    Raises:
        ModelError: A setting has a value that this family does not support.
    """
    require(config, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False})
    heads = int(config["num_attention_heads"])
    return ModelShape(
        architecture=ARCHITECTURE,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        ffn=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads", heads)),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        rope_theta=rope_theta(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=True,
        init_std=float(config.get("initializer_range", 0.02)),
    )
