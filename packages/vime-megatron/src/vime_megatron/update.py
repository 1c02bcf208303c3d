"""One optimiser update over Megatron's optimiser: norm, refusal, clipping and AdamW, in few passes over memory.

Without TransformerEngine and Apex, Megatron measures and scales gradients parameter by parameter, through temporaries
as large as the gradients, and checks them for infinities in a pass of their own. Here the norm comes from a handful of
launches that are queued behind the backward pass; it is finite only if every gradient is, so it is the check too; and
the clipping factor is handed to torch's one-pass AdamW, which reads each gradient anyway. The device is waited for
once.

The order is: :func:`gradient_norm`, :func:`check_finite`, :func:`apply_update`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from vime_megatron.errors import GradientError
from vime_megatron.optim import inner_optimizers
from vime_megatron.parallel import Topology

_NORM_OFFSET = 1e-6  # Megatron's: keeps the clipping factor finite for a norm of 0


def _parts(optimizer: Any) -> list[Any]:
    """Return Megatron's optimisers, experts apart."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@torch.no_grad()
def gradient_norm(optimizer: Any, device: torch.device) -> Tensor:
    """Hand the reduced gradients to the optimiser and measure their global L2 norm, without waiting for the device.

    Args:
        optimizer: Megatron's optimiser; its ``main`` gradients become views of the gradient buffers.
        device: Where the result goes.

    Returns:
        Float32 scalar, the same on every rank; not finite if any gradient is not finite.
    """
    total = torch.zeros((), device=device)
    for part in _parts(optimizer):
        part.prepare_grads()
        # megatron-core 0.19 has the same under another name
        collect = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
        grads = collect()
        square = torch.stack(torch._foreach_norm(grads)).square().sum() if grads else torch.zeros((), device=device)
        group = part.get_grad_stats_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def check_finite(model: DistributedDataParallel, topology: Topology, *, loss: float, norm: float) -> None:
    """Refuse a step whose loss or gradients are not finite, on every rank alike.

    Args:
        model: The wrapped model, gradients reduced.
        topology: To collect the names from all ranks.
        loss: The global loss.
        norm: The global gradient norm; loss and norm are the same on every rank, so all ranks decide alike.

    Raises:
        GradientError: Names the tensors; gradients are left for inspection, nothing else has changed.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    reports = topology.gather(_not_finite(model.module.named_parameters()))
    names = [f"rank {rank}: {name} ({count} values)" for rank, found in enumerate(reports) for name, count in found]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise GradientError(
        "the step was refused: loss or gradients are not finite",
        where=shown or ("the loss" if not math.isfinite(loss) else "the norm: the sum of squares overflows"),
        seen=f"loss {loss}, gradient norm {norm}",
        expected="finite numbers",
        fix="weights and optimiser are unchanged: drop the batch, or look at the loss and its inputs",
    )


def _not_finite(params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, int]]:
    found = []
    for name, param in params:
        count = int((~torch.isfinite(param.main_grad)).sum())  # type: ignore[attr-defined]
        if count:
            found.append((name, count))
    return found


@torch.no_grad()
def apply_update(optimizer: Any, *, norm: float, limit: float, device: torch.device) -> None:
    """Clip by the global norm, update the masters and write the weights.

    Args:
        optimizer: Megatron's optimiser, after :func:`gradient_norm`.
        norm: The global norm.
        limit: Norm above which gradients are scaled down; 0 means no clipping.
        device: Where the optimiser's state lies.
    """
    factor = limit / (norm + _NORM_OFFSET) if limit else 1.0
    scaled = [inner for inner in inner_optimizers(optimizer) if _one_pass(inner)] if factor < 1.0 else []
    for inner in scaled:  # torch's fused AdamW divides each gradient by this as it reads it
        inner.grad_scale = torch.tensor(1.0 / factor, device=device)  # type: ignore[attr-defined]
    try:
        for part in _parts(optimizer):
            if factor < 1.0 and part.optimizer not in scaled:
                grads = [param.grad for param in part.get_parameters() if param.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, factor)
            part.step_with_ready_grads()
    finally:
        for inner in scaled:
            del inner.grad_scale  # type: ignore[attr-defined]


def _one_pass(inner: torch.optim.Optimizer) -> bool:
    """Tell whether torch's fused AdamW runs there, which takes a divisor for the gradients."""
    return isinstance(inner, torch.optim.Adam) and all(group["fused"] for group in inner.param_groups)
