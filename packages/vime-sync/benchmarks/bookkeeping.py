"""What the host does with the digests of one update while the engine is paused: with objects, as once, and with arrays.

No device is needed: the sums that a kernel left are made up, their number and the tensors' are those of a model shape.
Both ways start from the same sums and the same control block and end with the same verdict and the same total.

    python benchmarks/bookkeeping.py --shape qwen3-8b --out bookkeeping_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vime_sync.agree import Share
from vime_sync.bench import SHAPES, BenchModel, Shape
from vime_sync.control import ControlBlock, segment_name
from vime_sync.digest import Digest, Sums
from vime_sync.layout import CheckpointTensor, Piece, Region, contiguous_strides, whole
from vime_sync.model import plan_model
from vime_sync.plan import Plan
from vime_sync.tally import Tally

Pieces = dict[str, list[tuple[int, int]]]


def plan_of(shape: Shape) -> tuple[Plan, Pieces]:
    """The plan of a shape's slices, each as small as can be; their number is what counts."""
    small = Shape(shape.layers, 8, 16, 16, 8, 32)
    described, pieces = [], {}
    for name, extents in [part for parts in small.fused().values() for part in parts]:
        region = Region(0, name, 0, extents, contiguous_strides(extents))
        described.append(CheckpointTensor(name, extents, torch.float32, (Piece(whole(extents), region, len(pieces)),)))
        pieces[name] = [(0, len(pieces))]
    return plan_model(BenchModel(small, torch.device("cpu"), torch.float32), described), pieces


def with_objects(plan: Plan, pieces: Pieces, control: ControlBlock, sums: torch.Tensor) -> str:
    """One `Digest` a slice, added and compared one by one."""
    landed = [Digest()] * len(plan.copies)
    for index, pair in enumerate(sums.tolist()):
        landed[index] += Digest.from_pair(pair)
    published = {0: control.digests()[2]}
    expected = {n: sum((published[rank][i] for rank, i in pieces[n]), Digest()) for n in pieces}
    for _ in range(2):  # once to compare, once for the total
        totals: dict[str, Digest] = {}
        for copy, digest in zip(plan.copies, landed, strict=True):
            totals[copy.tensor] = totals.get(copy.tensor, Digest()) + digest
    assert all(totals[name] == digest for name, digest in expected.items())
    sum(expected.values(), Digest())
    return str(sum(totals.values(), Digest()))


def with_arrays(tally: Tally, control: ControlBlock, sums: torch.Tensor) -> str:
    """What a receiver does."""
    landed = tally.landed(sums.numpy().view(np.uint64))
    expected = tally.expected({0: control.sums()[2]})
    tally.compare(landed, expected)
    str(Digest.total(expected))
    return str(Digest.total(landed))


def clock(run: Callable[[], str], times: int = 200) -> list[float]:
    """Milliseconds of each of several runs, after some that warm up."""
    found = []
    for index in range(times + 20):
        started = time.perf_counter()
        run()
        if index >= 20:
            found.append((time.perf_counter() - started) * 1e3)
    return found


def main() -> None:
    """Measure both ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    plan, pieces = plan_of(SHAPES[options.shape])
    random: Sums = np.random.default_rng(0).integers(0, 2**64, (len(plan.copies), 2), dtype=np.uint64)
    by_name = {copy.tensor: random[index] for index, copy in enumerate(plan.copies)}
    control = ControlBlock(segment_name(), len(pieces), create=True)
    control.begin()
    control.finish(1, "full", 1, np.stack([by_name[name] for name in pieces]))
    sums, tally = torch.from_numpy(random.view(np.int64)), Tally(plan, pieces, Share.alone(plan))
    ways = {
        "objects": lambda: with_objects(plan, pieces, control, sums),
        "arrays": lambda: with_arrays(tally, control, sums),
    }
    assert ways["objects"]() == ways["arrays"]()
    result: dict[str, Any] = {"shape": options.shape, "slices": len(plan.copies), "tensors": len(pieces)}
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    result["machine"] = {
        "cpu": cpu.split(":")[1].strip(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
    for name, run in ways.items():
        times = clock(run)
        result[name] = {"ms_median": round(statistics.median(times), 4), "ms_least": round(min(times), 4)}
    control.close()
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result)


if __name__ == "__main__":
    main()
