"""Megatron's data parallelism, optimiser and schedule, set so that gradients are exact sums.

With ``calculate_per_token_loss`` Megatron's gradient buffers add over data-parallel ranks and divide by nothing, which
is what a loss that already holds its global normaliser needs.

The update itself is in :mod:`vime_megatron.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from vime_megatron.config import OptimizerSettings
from vime_megatron.kernels import HalfTypes
from vime_megatron.model.policy import PolicyModel


def wrap_data_parallel(model: PolicyModel, settings: OptimizerSettings) -> DistributedDataParallel:
    """Give the model flat float32 gradient buffers, reduced once per step.

    Args:
        model: This rank's part of the model.
        settings: Whether the optimiser is distributed.

    Returns:
        The wrapped model.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=settings.distributed,
        check_for_nan_in_grad=False,  # update.check_finite does, with the name, and without killing the process
    )
    return DistributedDataParallel(model.config, ddp, model)


def build_optimizer(
    model: DistributedDataParallel, settings: OptimizerSettings, dtype: torch.dtype
) -> tuple[Any, OptimizerParamScheduler]:
    """Create the optimiser and its schedule.

    Args:
        model: The wrapped model, weights loaded (those in half precision give the float32 masters).
        settings: AdamW and schedule.
        dtype: Type of the weights.

    Returns:
        Megatron's optimiser and scheduler.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=0.0,  # vime_megatron.update clips
            # For float16 too: to the optimiser this says half-precision weights under float32 masters. `fp16` would add
            # Megatron's scaler: one more pass over all gradients, a wait for the device, and steps that are skipped.
            bf16=dtype in HalfTypes,
            params_dtype=dtype,
            use_distributed_optimizer=settings.distributed,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    _fuse(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps or settings.warmup_steps + 1,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the torch optimisers inside Megatron's wrapper."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def count_home(group: Mapping[str, Any], master: Tensor) -> torch.device:
    """Return where torch's AdamW keeps its counts of updates: on the CPU, but beside the master with the fused kernel.

    Args:
        group: Settings of the master's group.
        master: What is updated.
    """
    return master.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Return what the optimiser keeps on the device: its parameters (float32 masters) and their moments."""
    found = []
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                found.append(param.data)
                state = inner.state.get(param, {}).values()
                found += [value for value in state if isinstance(value, Tensor) and value.device == param.device]
    return found


def _fuse(optimizer: Any) -> None:
    """Let torch's AdamW update each parameter in one pass over memory on a GPU.

    Megatron builds the plain one when neither TransformerEngine nor Apex is installed, and has no setting for it.
    """
    for inner in inner_optimizers(optimizer):
        if type(inner) not in (torch.optim.AdamW, torch.optim.Adam):
            continue
        for group in inner.param_groups:
            if all(param.is_cuda for param in group["params"]):
                group.update(fused=True, foreach=False)


def gradient_buffers(model: DistributedDataParallel) -> list[Any]:
    """Return Megatron's flat parameter-and-gradient buffers, those of experts last."""
    return [*model.buffers, *model.expert_parallel_buffers]
