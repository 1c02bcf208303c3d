"""Llama."""

from vime_megatron.families.llama.config import ARCHITECTURE, shape_of
from vime_megatron.families.llama.mapping import RULES

__all__ = ["ARCHITECTURE", "RULES", "shape_of"]
