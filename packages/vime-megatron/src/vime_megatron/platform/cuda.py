"""NVIDIA and AMD GPUs: what Megatron-Core expects, with the fused kernels that a build lacks left alone.

A ROCm build of torch answers to ``torch.cuda``, so both vendors share this module. Nothing here initialises
Megatron's CUDA-only fused kernels: the models of this package do not use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed


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

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this GPU current for the length of the context."""
        with torch.cuda.device(self.device):
            yield

    def seed(self, seed: int) -> None:
        """Seed torch and Megatron's tensor-parallel generators."""
        torch.manual_seed(seed)
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(seed)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)
