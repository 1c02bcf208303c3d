"""Where the trainer runs: one small object per kind of device.

Megatron-Core is written for ``torch.cuda``, which is also what a ROCm build of torch answers to. A CPU needs a layer of
its own (:mod:`vime_megatron.platform.cpu`); it is loaded only when the CPU was chosen and refuses to load beside a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from vime_megatron.config import Device
from vime_megatron.errors import PlatformError


class Platform(Protocol):
    """What the trainer asks of its device."""

    device: torch.device
    backend: str

    def active(self) -> AbstractContextManager[None]:
        """Return a context inside which Megatron-Core may be called; reentrant."""

    def seed(self, seed: int) -> None:
        """Seed every random generator, Megatron's tracker included; needs the process groups."""

    def synchronize(self) -> None:
        """Wait for the device."""


def select_platform(device: Device, index: int = 0) -> Platform:
    """Choose the platform.

    Args:
        device: ``cpu``, ``cuda`` (NVIDIA or AMD), or ``auto``: the GPU when torch sees one.
        index: Which visible GPU this rank uses.

    Returns:
        The platform.

    Raises:
        PlatformError: A GPU was asked for and torch sees none, or the CPU was asked for beside a GPU.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus <= index:
        raise PlatformError(
            "no such GPU", where=f"device index {index}", seen=f"{gpus} visible", fix="use device='auto' or 'cpu'"
        )
    if device == "cpu" or gpus == 0:
        from vime_megatron.platform.cpu import CpuPlatform

        return CpuPlatform()
    from vime_megatron.platform.cuda import CudaPlatform

    return CudaPlatform(index)
