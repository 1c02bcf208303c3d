"""Qwen2 and Qwen2.5: where each checkpoint tensor lies."""

from __future__ import annotations

from vime_megatron.families.blocks import attention, decoder_ends, dense_mlp, norms

RULES = (
    *decoder_ends(),
    *norms(),
    *attention(),
    *dense_mlp(),
)
