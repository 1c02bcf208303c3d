"""Which core attention runs: settled once from what is installed, told in the log, or forced and then never replaced.

``auto`` takes only what was measured or needs no measuring: padded groups on a CPU and in float32; on an NVIDIA GPU in
half precision those or torch's variable-length kernel, row by row (see :mod:`vime_megatron.model.core_attention`). On
an AMD GPU the ragged rows go to flash-attn where it is installed, since torch's variable-length kernel is not confirmed
there. TransformerEngine runs when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from vime_megatron.config import AttentionBackend
from vime_megatron.errors import PlatformError
from vime_megatron.kernels import HalfTypes
from vime_megatron.model.attention_libraries import flash_attention, transformer_engine_attention
from vime_megatron.model.core_attention import (
    CoreAttention,
    row_by_row,
    sdpa_attention,
    varlen_attention,
    varlen_options,
)

_BACKENDS: dict[str, CoreAttention] = {
    "sdpa": sdpa_attention,
    "varlen": varlen_attention,
    "flash": flash_attention,
    "te": transformer_engine_attention,
}
_NEEDED = {
    "varlen": ("torch.nn.attention.varlen", "varlen_attn"),
    "flash": ("flash_attn", "flash_attn_varlen_func"),
    "te": ("transformer_engine.pytorch", "DotProductAttention"),
}


def obstacles(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Say of each backend why it cannot run.

    Args:
        device: Where the model runs.
        dtype: Type of the activations.

    Returns:
        Reasons by backend; empty text where it can.
    """
    reasons = {"sdpa": ""}
    for backend, (module, name) in _NEEDED.items():
        if device.type != "cuda" or dtype not in HalfTypes:
            reasons[backend] = f"needs a GPU and half precision, not {device.type} and {dtype}"
        else:
            reasons[backend] = _absent(module, name)
    return reasons


def _absent(module: str, name: str) -> str:
    try:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
        found = importlib.import_module(module)
    except (ImportError, OSError) as error:  # built for another torch, or its parent is not there
        return f"{module} cannot be imported: {error}"
    return "" if hasattr(found, name) else f"{module} has no {name}"


def choose_attention(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str:
    """Settle what ``auto`` means and refuse what cannot work.

    Args:
        backend: What was asked for.
        device: Where the model runs.
        dtype: Type of the activations.

    Returns:
        A backend's name, or two joined by ``+``: the first for even rows, the second for ragged ones.

    Raises:
        PlatformError: A backend was forced where it cannot run, or the variable-length kernel's arguments are unknown.
    """
    reasons = obstacles(device, dtype)
    if backend == "auto":
        ragged = ("flash",) if torch.version.hip else ("varlen", "flash")
        chosen = next((name for name in ragged if not reasons[name]), "")
        backend_name = f"sdpa+{chosen}" if chosen else "sdpa"
    elif reasons[backend]:
        able = [name for name, reason in reasons.items() if not reason]
        raise PlatformError(
            f"{backend} attention cannot run here",
            seen=reasons[backend],
            expected="a GPU, half precision and the library",
            fix=f"use attention='auto', or what can run here: {', '.join(able)}",
        )
    else:
        backend_name = backend
    if "varlen" in backend_name:
        varlen_options()
    return backend_name


def core_attention(name: str) -> CoreAttention:
    """Return the attention that :func:`choose_attention` has named."""
    even, _, ragged = name.partition("+")
    return row_by_row(_BACKENDS[even], _BACKENDS[ragged]) if ragged else _BACKENDS[even]
