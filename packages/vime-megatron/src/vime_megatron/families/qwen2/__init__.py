"""Qwen2 and Qwen2.5."""

from vime_megatron.families.qwen2.config import ARCHITECTURE, shape_of
from vime_megatron.families.qwen2.mapping import RULES

__all__ = ["ARCHITECTURE", "RULES", "shape_of"]
