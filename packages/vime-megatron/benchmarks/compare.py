"""The trainer before a change and after it, in one process and in turns, so that nothing else differs.

Each switch undoes one change; a variant is a set of switches. The variants run one after the other, all of them once
more, and each first does a step that is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional as F
from vime_megatron import MegatronTrainer, TrainSequence, forward, logprobs, sft_loss
from vime_megatron.kernels import PLAIN, triton_kernels
from vime_megatron.model.layer import DecoderLayer
from vime_megatron.model.mlp import GatedMLP
from vime_megatron.model.norm import RMSNorm
from vime_megatron.model.recompute import offer
from vime_megatron.offload import MoveReport, _grown

_LAYER_FORWARD = DecoderLayer.forward
_NORM_FORWARD = RMSNorm.forward
VARIANTS: dict[str, frozenset[str]] = {
    "before": frozenset(),
    "layer": frozenset({"sums", "residual"}),  # weight gradients in their buffers, residual sums with the norms
    "now": frozenset({"sums", "residual", "update"}),  # and the update in one pass
    "now, chunks of 4096": frozenset({"sums", "residual", "update", "chunk"}),  # instead of 2048, for 0.6 GB
}


def _norm_alone(self: RMSNorm, x: Tensor) -> Tensor:
    normed = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
    if not self.selective:
        return normed
    kept, weight = x.detach(), self.weight.detach()
    return offer(normed, lambda: F.rms_norm(kept, weight.shape, weight, self.eps))


def _switch(trainer: MegatronTrainer, on: frozenset[str], *, selective: bool) -> None:
    """Put a variant in force."""
    adamw = triton_kernels(torch.device("cpu")).adamw if torch.cuda.is_available() else PLAIN.adamw
    for module in trainer.model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = "sums" in on
        if isinstance(module, RMSNorm | GatedMLP):
            module.selective = selective

    def apart(hidden_tm: Any, weight_vm: Any, *rest: Any, **options: Any) -> Any:
        return logprobs.token_logprobs(hidden_tm, weight_vm.view_as(weight_vm), *rest, **options)  # has no main_grad

    trainer._kernels = replace(trainer._kernels, adamw=adamw if "update" in on else None)
    shard = trainer._forward._shard
    trainer._forward._shard = replace(shard, chunk=4096 if "chunk" in on else trainer.config.logprob_chunk_tokens)
    forward.token_logprobs = logprobs.token_logprobs if "sums" in on else apart
    DecoderLayer.forward = _LAYER_FORWARD if "residual" in on else TransformerLayer.forward
    RMSNorm.forward = _NORM_FORWARD if "residual" in on else _norm_alone


def compare(trainer: MegatronTrainer, batch: list[TrainSequence], rounds: int, steps: int) -> dict[str, Any]:
    """Time the variants with no and with selective recomputation.

    Args:
        trainer: Built with no recomputation.
        batch: The global batch.
        rounds: Turns of each variant.
        steps: Timed steps of a turn.

    Returns:
        Seconds, losses, gradient norms and peak memory by case.
    """
    cases = {
        f"{'selective' if selective else 'none'}-{name}": (on, selective)
        for selective in (False, True)
        for name, on in VARIANTS.items()
    }
    results: dict[str, Any] = {case: {"seconds": [], "losses": [], "grad_norms": []} for case in cases}
    for _ in range(rounds):
        for case, (on, selective) in cases.items():
            _switch(trainer, on, selective=selective)
            trainer.step(batch, sft_loss)
            trainer._meter._peaks.clear()
            row = results[case]
            for _ in range(steps):
                metrics = trainer.step(batch, sft_loss)
                row["seconds"].append(metrics.seconds)
                row["losses"].append(metrics.loss)
                row["grad_norms"].append(metrics.grad_norm)
            row["peak_gb"] = trainer_peak(trainer)
            print(case, row, flush=True)
    tokens = sum(len(sequence) for sequence in batch)
    count = sum(param.numel() for param in trainer.params.values())
    for row in results.values():
        seconds = statistics.median(row["seconds"])
        row |= {
            "ms": round(1e3 * seconds, 1), "fastest_ms": round(1e3 * min(row["seconds"]), 1),
            "tok_s": round(tokens / seconds), "tflops_6n": round(6 * count * tokens / seconds / 1e12, 1),
        }  # fmt: skip
    _switch(trainer, VARIANTS["now"], selective=False)
    return results


def trainer_peak(trainer: MegatronTrainer) -> float:
    """Return the highest device memory of a training phase so far, in GB."""
    return round(trainer.memory().get("device_peak_gib.train", 0.0) * 2**30 / 1e9, 2)


def offload_cycles(trainer: MegatronTrainer, batch: list[TrainSequence], cycles: int) -> list[dict[str, Any]]:
    """Move the state out and back, allocating everything before the first copy in every other cycle, as it was before.

    Args:
        trainer: The trainer, at least one step old.
        batch: Proves at the end that it still trains.
        cycles: How many; the first one pins host memory.

    Returns:
        One report of each cycle, with the rates in GB/s.
    """
    reports = []
    for cycle in range(cycles):
        out = trainer.offload()
        started = time.perf_counter()
        before = bool(cycle % 2)
        if before:
            for moved in trainer._parking._away.values():
                list(_grown(moved))
        back = trainer.onload()
        seconds = time.perf_counter() - started
        reports.append({
            "allocated": "first" if before else "while copying",
            "out": out.to_dict(), "back": back.to_dict() | {"seconds": seconds},
            "out_gb_s": _rate(out, out.seconds), "back_gb_s": _rate(back, seconds),
        })  # fmt: skip
        print(reports[-1], flush=True)
    trainer.step(batch, sft_loss)
    return reports


def _rate(report: MoveReport, seconds: float) -> float:
    return round(report.bytes_copied / seconds / 1e9, 1)


def pinning() -> dict[str, Any]:
    """Measure how fast host memory is pinned: by torch's allocator, and touched by many threads and then registered."""
    size = 2 << 30
    runtime = torch.cuda.cudart()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def allocated() -> tuple[torch.Tensor, Callable[[], Any]]:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), lambda: None

    def registered() -> tuple[torch.Tensor, Callable[[], Any]]:
        host = torch.empty(size, dtype=torch.uint8)
        host.zero_()
        touched.append(time.perf_counter() - started)
        code = runtime.cudaHostRegister(host.data_ptr(), size, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister: {code}")
        return host, lambda: runtime.cudaHostUnregister(host.data_ptr())

    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, make in (("allocated", allocated), ("registered", registered)):
        touched: list[float] = []
        started = time.perf_counter()
        host, release = make()
        spent = time.perf_counter() - started
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        copied = time.perf_counter() - started
        pinned = host.is_pinned()
        release()
        results[name] = {
            "gb_s": round(size / spent / 1e9, 2), "touched_s": touched, "seconds": round(spent, 3),
            "pinned": pinned, "to_device_gb_s": round(size / copied / 1e9, 1),
        }  # fmt: skip
        print(name, results[name], flush=True)
    return results
