"""Qwen2 and Qwen2.5: biases on queries, keys and values (Qwen2 technical report, arXiv 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_megatron.families.shape import ModelShape, decoder_shape

ARCHITECTURE = "Qwen2ForCausalLM"


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the model's sizes.

    Args:
        config: Parsed ``config.json``.

    Returns:
        The shape.

    Raises:
        ModelError: A setting has a value that this family does not support.
    """
    return decoder_shape(config, ARCHITECTURE, qkv_bias=True)
