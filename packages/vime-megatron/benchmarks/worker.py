"""One rank of one benchmark arm; started by ``bench.py``."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare
import micro
import torch
from arms import ARMS, COMMON, QWEN3
from vime_megatron import MegatronTrainer, OptimizerSettings, TrainerConfig, TrainSequence, sft_loss


def _model_folder(shape: str) -> Path:
    folder = Path(mkdtemp(prefix=f"bench-{shape}-"))
    (folder / "config.json").write_text(json.dumps(COMMON | QWEN3[shape]))
    return folder


def _batch(lengths: list[int], vocab: int) -> list[TrainSequence]:
    draw = torch.Generator().manual_seed(0)
    total = sum(lengths)
    return [
        TrainSequence(torch.randint(0, vocab, (n,), generator=draw), {"weight": torch.full((n,), 1 / total)})
        for n in lengths
    ]


def _idle(profiler: Any, *, least_us: float = 300.0) -> str:
    """List the longest stretches in which the GPU had nothing to do, and what the host was doing then."""
    events = profiler.events()
    busy = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    host = [e for e in events if e.device_type.name == "CPU"]
    gaps: list[tuple[float, list[str]]] = []
    end = busy[0][0] if busy else 0
    for start, stop in busy:
        if start - end > least_us:
            during = {e.name for e in host if e.time_range.start < start and e.time_range.end > end}
            gaps.append((start - end, sorted(during)[:12]))
        end = max(end, stop)
    first = min((e.time_range.start for e in host), default=0)
    lines = [f"before the first kernel: {(busy[0][0] - first) / 1e3:.1f} ms"] if busy else []
    lines += [f"{gap / 1e3:.1f} ms: {', '.join(names)[:300]}" for gap, names in sorted(gaps, reverse=True)[:25]]
    return "idle stretches of the GPU\n" + "\n".join(lines)


def _profile(trainer: MegatronTrainer, batch: list[TrainSequence], path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        trainer.step(batch, sft_loss)
    events = profiler.key_averages()
    sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = events.table(sort_by=sort, row_limit=45, max_name_column_width=90)
    shapes = profiler.key_averages(group_by_input_shape=True).table(
        sort_by=sort, row_limit=40, max_name_column_width=60, max_shapes_column_width=90
    )
    path.write_text(f"{_idle(profiler)}\n\n{table}\n\n{shapes}\n")


def train(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time optimiser steps; then, where the arm says so, a profile and cycles of offload."""
    spec = ARMS[arm]
    started = time.perf_counter()
    config = TrainerConfig(
        model=_model_folder(spec["shape"]),
        random_weights=True,
        max_tokens_per_microbatch=spec["budget"],
        optimizer=OptimizerSettings(lr=1e-6, distributed=spec.get("distributed", False)),
        **spec["settings"],
    )
    address = f"tcp://127.0.0.1:{options.port}" if options.world > 1 else None
    trainer = MegatronTrainer(
        config, rank=options.rank, world_size=options.world, init_method=address, device_index=options.gpu
    )
    built = time.perf_counter() - started
    count = sum(param.numel() for param in trainer.params.values()) * config.tensor_parallel
    batch = _batch(spec["documents"], trainer.shape.vocab)
    steps = []
    for _ in range(spec["steps"]):
        metrics = trainer.step(batch, sft_loss)
        steps.append({"seconds": metrics.seconds, "loss": metrics.loss, "grad_norm": metrics.grad_norm})
        print(json.dumps(steps[-1]), flush=True)
    seconds = statistics.median(step["seconds"] for step in steps[2:] or steps)
    tokens = sum(spec["documents"])
    summary = {
        "tok_s": round(tokens / seconds),
        "tflops_6n_gpu": round(6 * count * tokens / seconds / options.world / 1e12, 1),
        "ms": round(1e3 * seconds, 1),
        "peak_gb": compare.trainer_peak(trainer),
        "loss": round(steps[0]["loss"], 4),
    }
    result = {
        "summary": summary, "steps": steps, "build_s": built, "parameters": count, "choices": trainer.choices,
        "settings": config.to_dict() | {"model": spec["shape"]},
    }  # fmt: skip
    _save(arm, options, result)
    _extras(arm, options, trainer, batch, result)
    trainer.close()
    return result


def _extras(
    arm: str, options: argparse.Namespace, trainer: MegatronTrainer, batch: list[TrainSequence], result: dict[str, Any]
) -> None:
    """Measure what else the arm asks for; each part is saved as soon as it is there."""
    spec, summary = ARMS[arm], result["summary"]
    if "compare" in spec:
        result["compare"] = compare.compare(trainer, batch, **spec["compare"])
        kept = ("ms", "tok_s", "tflops_6n", "peak_gb")
        summary["compare"] = {case: [row[key] for key in kept] for case, row in result["compare"].items()}
        _save(arm, options, result)
    if "cycles" in spec:
        result["offload"] = compare.offload_cycles(trainer, batch, spec["cycles"])
        kept = ("allocated", "out_gb_s", "back_gb_s")
        summary["offload"] = [[row[key] for key in kept] for row in result["offload"]]
        _save(arm, options, result)
    if spec.get("pinning"):
        result["pinned"] = summary["pinned"] = micro.pinned()
        _save(arm, options, result)
        result["pinning"] = summary["pinning"] = compare.pinning()
    if spec.get("offload"):
        result["offload"] = _offload(trainer, batch)
        summary["offload"] = result["offload"][-1]
        _save(arm, options, result)
    if spec.get("profile"):
        _profile(trainer, batch, options.out / f"{arm}.{options.rank}.profile.txt")


def _offload(trainer: MegatronTrainer, batch: list[TrainSequence]) -> list[dict[str, Any]]:
    """Move the state out and back three times, then prove that it still trains."""
    cycles = []
    for _ in range(3):
        out = trainer.offload()
        back = trainer.onload()
        cycles.append({"out": out.to_dict(), "back": back.to_dict()})
        print(json.dumps(cycles[-1]), flush=True)
    trainer.step(batch, sft_loss)
    return cycles


def _save(arm: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.rank == 0:
        versions = {"torch": torch.__version__}
        if torch.cuda.is_available():
            versions["gpu"] = torch.cuda.get_device_name(options.gpu)
        (options.out / f"{arm}.json").write_text(json.dumps(versions | result, indent=1) + "\n")


def main() -> None:
    """Run the arm that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm")
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("rank", 0), ("world", 1), ("port", 29555), ("gpu", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if torch.cuda.is_available():
        torch.cuda.set_device(options.gpu)
    kind = ARMS[options.arm]["kind"]
    result = (
        train(options.arm, options) if kind == "train" else micro.run(kind, lambda r: _save(options.arm, options, r))
    )
    _save(options.arm, options, result)


if __name__ == "__main__":
    main()
