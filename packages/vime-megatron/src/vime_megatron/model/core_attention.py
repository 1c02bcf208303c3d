"""Causal attention inside the documents of a packed row, without TransformerEngine.

Two backends of torch's own. ``sdpa`` runs :func:`torch.nn.functional.scaled_dot_product_attention` on groups of
documents padded to a common length (see :mod:`vime_megatron.model.packing`): it works on CPUs and on every GPU.
``varlen`` hands the borders to ``torch.nn.attention.varlen``'s flash kernel: GPUs in half precision only.

Where both work, :func:`row_by_row` decides from the documents' lengths alone, so that the same row is always computed
alike. Documents of one length are a batch already, which on an H200 runs 1.8 times as
fast as the ragged kernel (488 against 270 TFLOP/s forward, 443 against 247 backward). Other rows go to ``varlen``:
padding them costs gathers and scattered sums (5.2 ms against 3.1 ms for ten documents of 134 to 5000 tokens), and
cuDNN, which serves the batch on Hopper, plans anew for every shape, 70 ms each. For the same reason only a length that
comes again counts, a multiple of 128: limits are such numbers, and one document of any length is not a reason to plan.

Suffixes: ``t`` tokens, ``h`` query heads, ``g`` key/value heads, ``e`` width of a head, ``n`` documents of a group and
``l`` their length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vime_megatron.errors import PlatformError
from vime_megatron.model.packing import PackedTokens

CoreAttention = Callable[[Tensor, Tensor, Tensor, PackedTokens], Tensor]
"""``(q_the, k_tge, v_tge, row) -> out_the``."""

_PLANNED_LENGTH = 128  # lengths that are worth a plan of their own are multiples of this
_VARLEN_REQUIRED = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")


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
    if row.uniform:
        batch = (len(row.lengths), row.longest)
        return _attend(*(x.view(*batch, *x.shape[1:]) for x in (q_the, k_tge, v_tge))).flatten(0, 1)
    outputs = []
    groups, ungroup_t = row.groups
    for rows_nl in groups:
        flat = rows_nl.flatten()
        parts = (x.index_select(0, flat).view(*rows_nl.shape, *x.shape[1:]) for x in (q_the, k_tge, v_tge))
        outputs.append(_attend(*parts).flatten(0, 1))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, ungroup_t)


def _attend(q_nlhe: Tensor, k_nlge: Tensor, v_nlge: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_nlhe, k_nlge, v_nlge))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def varlen_attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
    """Attend with the variable-length flash kernel; arguments as :func:`sdpa_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = dict(varlen_options())
    if "enable_gqa" in options:
        options["enable_gqa"] = q_the.shape[1] != k_tge.shape[1]
    out: Any = varlen_attn(q_the, k_tge, v_tge, row.borders, row.borders, row.longest, row.longest, **options)
    return cast("Tensor", out)


def row_by_row(even: CoreAttention, ragged: CoreAttention) -> CoreAttention:
    """Choose for each row, from the lengths of its documents; see the module's text.

    Args:
        even: For documents of one length that comes again.
        ragged: For all others.

    Returns:
        The attention.
    """

    def attention(q_the: Tensor, k_tge: Tensor, v_tge: Tensor, row: PackedTokens) -> Tensor:
        attend = even if row.uniform and row.longest % _PLANNED_LENGTH == 0 else ragged
        return attend(q_the, k_tge, v_tge, row)

    return attention


@cache
def varlen_options() -> tuple[tuple[str, Any], ...]:
    """Say "causal" as this torch's kernel wants it: its arguments changed between releases.

    Without ``enable_gqa`` among them the kernel takes fewer key/value heads than query heads unasked.

    Returns:
        Arguments by name.

    Raises:
        PlatformError: The kernel's arguments are unknown.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = next((pair for pair in (("window_size", (-1, 0)), ("is_causal", True)) if pair[0] in known), None)
    if causal is None or tuple(known)[: len(_VARLEN_REQUIRED)] != _VARLEN_REQUIRED:
        raise PlatformError(
            "torch.nn.attention.varlen has changed its arguments",
            where=f"torch {torch.__version__}",
            seen=", ".join(known),
            expected=", ".join(_VARLEN_REQUIRED) + " and window_size or is_causal",
            fix="use attention='sdpa', or a torch from 2.10 to 2.13",
        )
    return (causal, ("enable_gqa", False)) if "enable_gqa" in known else (causal,)
