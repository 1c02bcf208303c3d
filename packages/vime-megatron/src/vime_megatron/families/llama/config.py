"""Llama 2 to 3.3 and what shares their class (SmolLM2): no biases, Llama 3's rotary scaling (arXiv 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_megatron.families.shape import ModelShape, decoder_shape, require, rope_scaling

ARCHITECTURE = "LlamaForCausalLM"


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read the model's sizes.

    Args:
        config: Parsed ``config.json``.

    Returns:
        The shape.

    Raises:
        ModelError: A setting has a value that this family does not support.
    """
    require(config, {"attention_bias": False, "mlp_bias": False})
    return decoder_shape(config, ARCHITECTURE, rope_scaling=rope_scaling(config, llama3=True))
