"""Random initial weights that do not depend on the parallel layout.

Each checkpoint tensor is drawn whole from a generator seeded by the run's seed and the tensor's name, and a rank keeps
its box, so that any layout starts from the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vime_megatron.families.mapping import Placement


def draw_weights(params: Mapping[str, Tensor], placed: Sequence[Placement], *, seed: int, std: float) -> None:
    """Fill this rank's parameters: normal matrices, zero biases, norms of one.

    Args:
        params: Local parameters by name; written in place.
        placed: Where each checkpoint box goes.
        seed: The run's seed.
        std: Standard deviation of the matrices.
    """
    with torch.no_grad():
        for place in placed:
            target = params[place.param][tuple(slice(start, stop) for start, stop in place.local)]
            if len(place.shape) == 1:
                target.fill_(0.0 if place.name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(target.device)
            generator.manual_seed(seed * 2**32 + zlib.crc32(place.name.encode()))
            whole = torch.empty(place.shape, device=target.device).normal_(0.0, std, generator=generator)
            target.copy_(whole[tuple(slice(start, stop) for start, stop in place.box)])
