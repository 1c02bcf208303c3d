"""What this build of torch and Megatron-Core has and lacks, and guards against using what it lacks.

A ROCm build of torch answers to ``torch.cuda`` but has none of the extensions that Megatron-Core's fused options load:
they are compiled by nvcc. The trainer never switches them on; :func:`check_fusions` makes sure, so that a default that
changes in another release of Megatron-Core is an error here and not a crash in a kernel loader. Two more things are
kept in order on every device: no process is forked once the device runtime has started (a child of a fork shares
handles that HIP and CUDA say must not be shared), and float32 products are computed in float32, whatever the process
has set for its other work, because the logits' softmax is only as exact as they are.

All guards are idempotent and leave the process as they found it, but for the fork warning, which stays.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from vime_megatron.errors import PlatformError

_log = logging.getLogger(__name__)

# Options of Megatron's TransformerConfig that load CUDA extensions, and the module each needs.
_CUDA_FUSIONS = {
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",
    "persist_layer_norm": "apex",
    "apply_rope_fusion": "transformer_engine",
}


def describe_build() -> str:
    """Return what torch was built for: ``HIP 7.1``, ``CUDA 13.0`` or ``CPU``."""
    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def check_fusions(config: Any) -> None:
    """Refuse fused options of Megatron-Core whose extensions are absent.

    Args:
        config: Megatron's ``TransformerConfig``.

    Raises:
        PlatformError: An option is on and its extension is not installed; the text names both.
    """
    absent = [
        f"{option} (needs {module})"
        for option, module in _CUDA_FUSIONS.items()
        if getattr(config, option, False) and importlib.util.find_spec(module) is None
    ]
    if absent:
        from megatron.core import __version__ as megatron

        raise PlatformError(
            "Megatron-Core would load extensions that this build has not",
            where=f"torch {torch.__version__} for {describe_build()}, megatron-core {megatron}",
            seen=", ".join(absent),
            expected="these options off",
            fix="use a tested release of megatron-core (0.16.1 or 0.19.2), or report this one",
        )


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 matrix products in float32 inside, and sum float16 ones in it.

    What was set before is set again afterwards. By default cuBLAS may add the partial sums of a float16 product in
    float16, which rounds them and overflows at 65504; bfloat16, whose setting is another, is left as it is.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # settings by backend, which the process-wide name cannot say
        before = ""
    parts: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn) if not before else ()
    kept = [part.matmul.fp32_precision for part in parts]
    blas = torch.backends.cuda.matmul
    reduced: Any = blas.allow_fp16_reduced_precision_reduction
    split: tuple[Any, ...] = ()  # newer releases of torch set a second thing by the same name
    if hasattr(blas, "allow_fp16_reduced_precision_reduction_split_k"):
        split = (blas.allow_fp16_reduced_precision_reduction_split_k,)
    blas.allow_fp16_reduced_precision_reduction = (False, *split) if split else False
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before and before != "highest":
            torch.set_float32_matmul_precision(before)
        for part, precision in zip(parts, kept, strict=True):
            part.matmul.fp32_precision = precision
        blas.allow_fp16_reduced_precision_reduction = (reduced, *split) if split else reduced


@cache
def warn_of_forks() -> None:
    """Warn, from now on and once, when this process forks; called when the device runtime starts.

    A hook that runs before a fork cannot stop it. Programs started with :mod:`subprocess` do not count, nor do
    processes by ``spawn`` and ``forkserver``.
    """
    owner = os.getpid()
    warned: list[bool] = []

    def before() -> None:
        if os.getpid() == owner and not warned:
            warned.append(True)
            _log.warning(
                "a process is being forked after %s has started: the child must not touch the GPU; "
                "use multiprocessing's spawn or forkserver, or threads",
                describe_build(),
            )

    os.register_at_fork(before=before)
