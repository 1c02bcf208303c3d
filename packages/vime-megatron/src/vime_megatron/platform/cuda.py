"""NVIDIA and AMD GPUs: what Megatron-Core expects, with the fused kernels that a build lacks left alone.

A ROCm build of torch answers to ``torch.cuda``, so both vendors share this module; what the two builds differ in is in
:mod:`vime_megatron.platform.build`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

from vime_megatron.platform.build import full_float32, warn_of_forks


class CudaPlatform:
    """One GPU of this process.

    Args:
        index: Which visible GPU.
    """

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, index: int) -> None:
        """Make the GPU current."""
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        warn_of_forks()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this GPU current, and float32 products exact, for the length of the context."""
        with torch.cuda.device(self.device), full_float32():
            yield

    def seed(self, seed: int) -> None:
        """Seed torch and Megatron's tensor-parallel generators."""
        torch.manual_seed(seed)
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(seed)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)
