"""Qwen3 dense: RMS norms on queries and keys, no biases (Qwen3 technical report, arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_megatron.families.shape import ModelShape, decoder_shape, require

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
    require(config, {"attention_bias": False})
    return decoder_shape(config, ARCHITECTURE, head_dim=int(config.get("head_dim") or 128), qk_norm=True)
