"""Qwen3 dense."""

from vime_megatron.families.qwen3.config import ARCHITECTURE, shape_of
from vime_megatron.families.qwen3.mapping import RULES

__all__ = ["ARCHITECTURE", "RULES", "shape_of"]
