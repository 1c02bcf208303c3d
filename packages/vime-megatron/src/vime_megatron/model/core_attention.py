"""Causal attention inside the documents of a packed row, without TransformerEngine.

Two backends. ``sdpa`` runs :func:`torch.nn.functional.scaled_dot_product_attention` on groups of documents padded to a
common length (see :mod:`vime_megatron.model.packing`): it works on CPUs and on every GPU. ``varlen`` hands the borders
to ``torch.nn.attention.varlen``'s kernel: GPUs in half precision only, and the one to use there.

Suffixes: ``t`` tokens, ``h`` query heads, ``g`` key/value heads, ``e`` width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vime_megatron.config import AttentionBackend
from vime_megatron.errors import PlatformError
from vime_megatron.model.packing import PackedTokens

CoreAttention = Callable[[Tensor, Tensor, Tensor, PackedTokens], Tensor]
"""``(q_the, k_tge, v_tge, row) -> out_the``."""


def sdpa_attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
    """Attend with padded groups of documents.

    Args:
        q_the: Queries ``[t, h, e]``.
        k_tge: Keys ``[t, g, e]``; ``h`` is a multiple of ``g``.
        v_tge: Values ``[t, g, e]``.
        row: The borders.

    Returns:
        ``[t, h, e]``.
    """
    outputs = []
    for rows in row.groups:
        q, k, v = (x[rows].transpose(1, 2) for x in (q_the, k_tge, v_tge))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[row.ungroup_t] if len(outputs) > 1 else outputs[0][row.ungroup_t]


def varlen_attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
    """Attend with the variable-length kernel; arguments as :func:`sdpa_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = dict(_varlen_options())
    grouped = q_the.shape[1] != k_tge.shape[1]
    if grouped and "enable_gqa" in options:
        options["enable_gqa"] = True
    elif grouped:
        share = q_the.shape[1] // k_tge.shape[1]
        k_tge, v_tge = (x.repeat_interleave(share, dim=1) for x in (k_tge, v_tge))
    out: Any = varlen_attn(q_the, k_tge, v_tge, row.borders, row.borders, row.longest, row.longest, **options)
    return cast("Tensor", out)


@cache
def _varlen_options() -> tuple[tuple[str, Any], ...]:
    """Say "causal" as this torch's kernel wants it: its arguments changed between releases."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = ("window_size", (-1, 0)) if "window_size" in known else ("is_causal", True)
    return (causal, ("enable_gqa", False)) if "enable_gqa" in known else (causal,)


def select_core_attention(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> CoreAttention:
    """Choose the backend once.

    Args:
        backend: What was asked for.
        device: Where the model runs.
        dtype: Type of the activations.

    Returns:
        The attention function.

    Raises:
        PlatformError: ``varlen`` was forced where it cannot work.
    """
    suits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_varlen()
    if backend == "varlen" and not suits:
        raise PlatformError(
            "varlen attention cannot run here",
            seen=f"{device.type}, {dtype}, torch {torch.__version__}",
            expected="a GPU, half precision and torch.nn.attention.varlen",
            fix="use attention='auto' or 'sdpa'",
        )
    return varlen_attention if suits and backend != "sdpa" else sdpa_attention


def _has_varlen() -> bool:
    try:
        import torch.nn.attention.varlen  # noqa: F401
    except ImportError:
        return False
    return True
