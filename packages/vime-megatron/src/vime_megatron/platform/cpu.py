"""Megatron-Core on a CPU: for tests, demonstrations and conversion, where no GPU exists.

Megatron-Core names its device by hand: it creates tensors with ``device="cuda"``, asks ``torch.cuda.current_device()``,
compares ``tensor.type()`` with strings such as ``"torch.cuda.FloatTensor"``, and keeps random state in CUDA generators.
Inside :meth:`CpuPlatform.active` this module answers all four for the CPU:

* a ``TorchFunctionMode`` rewrites the device argument and the type string of each call that passes through torch;
* a handful of ``torch.cuda``'s functions are replaced, and put back when the outermost context ends;
* Megatron's random tracker is its own no-op one.

Arithmetic is untouched. Importing the module where torch sees a GPU is an error, so it can never bend a GPU run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.overrides import TorchFunctionMode

from vime_megatron.errors import PlatformError
from vime_megatron.platform.build import full_float32

_CPU = torch.device("cpu")


def _refuse_beside_gpu() -> None:
    gpus = torch.cuda.device_count()
    if gpus:
        raise PlatformError(
            "the CPU layer was asked for where a GPU exists",
            seen=f"{gpus} GPUs visible to torch",
            expected="none",
            fix="use device='auto', or hide the GPUs from the process",
        )


_refuse_beside_gpu()


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites calls that name CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` with every mention of CUDA replaced by the CPU."""
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class CpuPlatform:
    """The CPU of this process, one thread pool shared by all."""

    backend = "gloo"
    device = _CPU

    def __init__(self) -> None:
        """Start inactive."""
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let Megatron-Core run on the CPU; contexts may nest."""
        if self._depth:
            yield
            return
        kept = [(module, name, getattr(module, name)) for module, name, _ in _TORCH_CUDA]
        self._depth += 1
        try:
            for module, name, answer in _TORCH_CUDA:
                setattr(module, name, answer)
            with _CudaMeansCpu(), full_float32():
                yield
        finally:
            for module, name, original in kept:
                setattr(module, name, original)
            self._depth -= 1

    def seed(self, seed: int) -> None:
        """Seed torch; Megatron's tracker becomes its no-op one, since there are no CUDA generators to keep apart."""
        torch.manual_seed(seed)
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)

    def synchronize(self) -> None:
        """Return at once: the CPU is never ahead."""


def _current_device() -> torch.device:
    return _CPU


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


class _Stream:
    """Stands in for the one stream of a device that is never ahead."""

    def wait_event(self, event: object) -> None:
        """Return at once."""


def _current_stream(device: object = None) -> _Stream:
    return _Stream()


def _nothing(*args: object, **kwargs: object) -> None:
    """Stand in for calls that wait for or free a GPU."""


_TORCH_CUDA: list[tuple[Any, str, Callable[..., Any]]] = [
    (torch.cuda, "current_device", _current_device),
    (torch.cuda, "current_stream", _current_stream),
    (torch.cuda, "get_rng_state", _get_rng_state),
    (torch.cuda.random, "get_rng_state", _get_rng_state),
    (torch.cuda, "set_rng_state", _set_rng_state),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
]
