"""Core attention by libraries that need not be installed: flash-attn (NVIDIA and AMD) and TransformerEngine.

Both take a packed row and its borders as they are. They are imported when they are chosen, never before. Arguments and
suffixes as in :mod:`vime_megatron.model.core_attention`. Neither has been run on a GPU by this package's tests, which
check the arguments against a stand-in with the library's signature.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, cast

from torch import Tensor

from vime_megatron.model.packing import PackedTokens


def flash_attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
    """Attend with flash-attn's variable-length kernel (arXiv 2307.08691)."""
    borders, longest = row.borders, row.longest
    kernel = import_module("flash_attn").flash_attn_varlen_func
    out: Any = kernel(q_the, k_tge, v_tge, borders, borders, longest, longest, causal=True)
    return cast("Tensor", out)


def transformer_engine_attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
    """Attend with TransformerEngine, which chooses among its own kernels."""
    attend = _module(q_the.shape[1], k_tge.shape[1], q_the.shape[2])
    out: Tensor = attend(
        q_the,
        k_tge,
        v_tge,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=row.borders,
        cu_seqlens_kv=row.borders,
        max_seqlen_q=row.longest,
        max_seqlen_kv=row.longest,
    )
    return out.view(q_the.shape)


@cache
def _module(heads: int, groups: int, width: int) -> Any:
    """Make TransformerEngine's module for some heads; it has no weights, so layers share it."""
    module = import_module("transformer_engine.pytorch").DotProductAttention
    return module(heads, width, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd")
