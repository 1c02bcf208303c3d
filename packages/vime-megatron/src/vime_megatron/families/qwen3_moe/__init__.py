"""Qwen3 with experts."""

from vime_megatron.families.qwen3_moe.config import ARCHITECTURE, shape_of
from vime_megatron.families.qwen3_moe.mapping import RULES

__all__ = ["ARCHITECTURE", "RULES", "shape_of"]
