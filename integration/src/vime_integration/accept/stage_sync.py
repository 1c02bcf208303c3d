"""Stage ``sync_bench``: how fast weights travel here, and that they arrive: `vime_sync.bench` with full digests.

Speed is recorded and not judged: what is fast depends on the machine, and the page has the figures beside the chip's
name. That every byte arrived, in every mode that this platform has, is judged.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from vime_devices import Platform
from vime_sync.bench import SHAPES, BenchResult, Shape, run_bench, shape_of_size

from vime_integration.accept.output import say
from vime_integration.accept.record import Acceptance, Report, Threshold
from vime_integration.accept.runs import usable_gpus

SHAPE = "qwen3-8b"
CPU_MB = 256
ROUNDS = 5


def sync_bench(acceptance: Acceptance) -> Report:
    """Measure every transport of the platform.

    Args:
        acceptance: What is accepted.
    """
    on_cpu = acceptance.devices is Platform.CPU
    shape: Shape = SHAPES[SHAPE]
    if on_cpu or acceptance.sync_mb:
        shape = shape_of_size(acceptance.sync_mb or CPU_MB)
    gpus = usable_gpus(acceptance)
    plan = [("shm", "copy"), ("shm", "alias")] if on_cpu else [("ipc", "copy"), ("ipc", "alias")]
    if not on_cpu and gpus > 1:
        plan.append(("nccl", "copy"))
    thresholds, figures = [], {}
    for transport, mode in plan:
        result = run_bench(transport, mode=mode, shape=shape, rounds=ROUNDS)
        name = f"{transport} {mode}"
        figures[name] = _figures(result)
        say(f"{name}: {figures[name]}")
        seen = "equal after every round" if result.digest_ok else "different"
        thresholds.append(Threshold(f"digest, {name}", seen, "equal after every round", result.digest_ok))
    notes = [] if on_cpu or gpus > 1 else ["one GPU: the transport between GPUs was not measured"]
    return Report(thresholds, figures, notes)


def _figures(result: BenchResult) -> dict[str, Any]:
    return {
        "device": result.device,
        "bytes": result.bytes,
        "milliseconds": round(median(result.seconds) * 1e3, 3),
        "publish_milliseconds": round(median(result.publish_seconds) * 1e3, 3),
        "connect_milliseconds": round(result.connect_seconds * 1e3, 3),
        "gb_per_s": result.gb_per_s,
    }
