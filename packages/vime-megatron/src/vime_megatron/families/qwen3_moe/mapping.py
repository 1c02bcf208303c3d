"""Qwen3 with experts: where each checkpoint tensor lies."""

from __future__ import annotations

from vime_megatron.families.blocks import attention, decoder_ends, expert_mlp, norms

RULES = (
    *decoder_ends(),
    *norms(),
    *attention(),
    *expert_mlp(),
)
