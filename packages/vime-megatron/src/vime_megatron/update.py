"""One optimiser update over Megatron's optimiser: norm, refusal, clipping and AdamW, in few passes over memory.

Without TransformerEngine and Apex, Megatron measures and scales gradients parameter by parameter, through temporaries
as large as the gradients, and checks them for infinities in a pass of their own. Here the norm comes from a handful of
launches that are queued behind the backward pass; it is finite only if every gradient is, so it is the check too; and
the clipping factor is handed to what updates, which reads each gradient anyway: the trainer's own kernel, which writes
the weight in half precision too, or torch's one-pass AdamW (where the distributed optimiser holds the state, whose
weights Megatron copies and gathers). The device is waited for once.

The order is: :func:`gradient_norm`, :func:`prepare_update`, :func:`check_finite`, :func:`apply_update`. The first two
are done while the device still computes gradients, so that nothing but launches is left between its answer and the
update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from vime_megatron.errors import GradientError
from vime_megatron.kernels import Kernels
from vime_megatron.kernels.plain import AdamWState, AdamWTerms
from vime_megatron.optim import count_home
from vime_megatron.parallel import Topology

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)  # before torch 2.7 neither is the other's parent
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


def check_finite(
    model: DistributedDataParallel, topology: Topology, *, loss: float, norm: float, scale: float = 1.0
) -> None:
    """Refuse a step whose loss or gradients are not finite, on every rank alike.

    Args:
        model: The wrapped model, gradients reduced.
        topology: To collect the names from all ranks.
        loss: The global loss.
        norm: The global gradient norm; loss and norm are the same on every rank, so all ranks decide alike.
        scale: The loss scale, for the text.

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
        seen=f"loss {loss}, gradient norm {norm}" + (f" with the loss scale {scale:g}" if scale != 1 else ""),
        expected="finite numbers",
        fix="weights and optimiser are unchanged: drop the batch, or look at the loss and its inputs"
        + (", or lower the loss scale or make it 'dynamic'" if scale != 1 and math.isfinite(loss) else ""),
    )


def _not_finite(params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, int]]:
    found = []
    for name, param in params:
        count = int((~torch.isfinite(param.main_grad)).sum())  # type: ignore[attr-defined]
        if count:
            found.append((name, count))
    return found


@dataclass(frozen=True)
class _OwnGroup:
    """What the trainer's kernel is given for one group of parameters, and their counts of updates."""

    states: list[AdamWState]
    counts: list[Tensor]
    corrections_n2: Tensor
    settings: dict[str, Any]


@dataclass(frozen=True)
class Update:
    """An update that is ready to be applied.

    Attributes:
        own: Groups that the trainer's kernel updates.
        rest: Megatron's optimisers that do it themselves.
    """

    own: list[_OwnGroup]
    rest: list[Any]


@torch.no_grad()
def prepare_update(optimizer: Any, kernels: Kernels) -> Update:
    """Collect what an update needs, without waiting for the device.

    Nothing changes yet, but that moments are made which are not there before the first update: zeros, as they are then.

    Args:
        optimizer: Megatron's optimiser, after :func:`gradient_norm`.
        kernels: What updates, if it can.

    Returns:
        For :func:`apply_update`.
    """
    own = [part for part in _parts(optimizer) if kernels.adamw is not None and _takes_own(part)]
    return Update(
        [group for part in own for group in _own_groups(part)], [p for p in _parts(optimizer) if p not in own]
    )


@torch.no_grad()
def apply_update(
    update: Update, kernels: Kernels, *, norm: float, limit: float, device: torch.device, scale: float = 1.0
) -> None:
    """Clip by the global norm, update the masters and write the weights.

    Args:
        update: From :func:`prepare_update`.
        kernels: The same as there.
        norm: The global norm, without the loss scale.
        limit: Norm above which gradients are scaled down; 0 means no clipping.
        device: Where the optimiser's state lies.
        scale: The loss scale, which is still in the gradients.
    """
    factor = (min(1.0, limit / (norm + _NORM_OFFSET)) if limit else 1.0) / scale
    for group in update.own:
        assert kernels.adamw is not None
        beta1, beta2 = group.settings["betas"]
        decay, eps = group.settings["weight_decay"], group.settings["eps"]
        torch._foreach_add_(group.counts, 1)
        terms = AdamWTerms(float(group.settings["lr"]), beta1, beta2, eps, decay, factor)
        kernels.adamw(group.states, group.corrections_n2, terms)
    inners = [part.optimizer for part in update.rest if part.optimizer is not None]
    scaled = [inner for inner in inners if _one_pass(inner)] if factor != 1.0 else []
    for inner in scaled:  # torch's fused AdamW divides each gradient by this as it reads it
        inner.grad_scale = torch.tensor(1.0 / factor, device=device)
    try:
        for part in update.rest:
            if factor != 1.0 and part.optimizer not in scaled:
                grads = [param.grad for param in part.get_parameters() if param.grad is not None]
                if grads:
                    torch._foreach_mul_(grads, factor)
            part.step_with_ready_grads()
    finally:
        for inner in scaled:
            del inner.grad_scale


def _one_pass(inner: torch.optim.Optimizer) -> bool:
    """Tell whether torch's fused AdamW runs there, which takes a divisor for the gradients."""
    return isinstance(inner, _ADAMS) and all(group["fused"] for group in inner.param_groups)


def _takes_own(part: Any) -> bool:
    """Tell whether the trainer's kernel does what this optimiser would: AdamW over whole masters of half weights."""
    inner = part.optimizer
    return (
        isinstance(part, Float16OptimizerWithFloat16Params)
        and isinstance(inner, _ADAMS)
        and all(
            group.get("decoupled_weight_decay", isinstance(inner, torch.optim.AdamW))
            and not group["amsgrad"]
            and not group["maximize"]
            for group in inner.param_groups
        )
    )


def _own_groups(part: Any) -> Iterator[_OwnGroup]:
    """Collect what ``part.step_with_ready_grads`` would change; the state stays torch's, names and counts included."""
    pairs = zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
    weights = {id(m): w.data for masters, halves in pairs for m, w in zip(masters, halves, strict=True)}
    for group in part.optimizer.param_groups:
        masters = [master for master in group["params"] if master.grad is not None]
        if not masters:
            continue
        kept = [_state(part.optimizer, group, master) for master in masters]
        counts = [state["step"] for state in kept]
        beta1, beta2 = group["betas"]
        counts_n = torch.stack(counts).to(masters[0].device, torch.float64) + 1
        corrections_n2 = torch.stack((1 - beta1**counts_n, (1 - beta2**counts_n).sqrt()), dim=1).float()
        states = [
            AdamWState(master.data, master.grad, state["exp_avg"], state["exp_avg_sq"], weights.get(id(master)))
            for master, state in zip(masters, kept, strict=True)
        ]
        yield _OwnGroup(states, counts, corrections_n2, group)


def _state(inner: torch.optim.Optimizer, group: dict[str, Any], master: Tensor) -> dict[str, Tensor]:
    """Return torch's state of a master; before the first update, as torch would make it then."""
    state: dict[str, Tensor] = inner.state[master]
    if not state:
        state["step"] = torch.zeros((), device=count_home(group, master))
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(master, requires_grad=False) for _ in range(2))
    return state
