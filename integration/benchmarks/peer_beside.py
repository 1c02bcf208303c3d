"""Put a run of ours and TRL's run of the same configuration (`peer_trl.py`) side by side.

    python integration/benchmarks/peer_beside.py RUN/metrics.jsonl peer.json --out beside.json

Only steps that both made are compared, because responses change their length while the policy learns; the first, which
warms up, counts for the reward and not for the times. The wall clock of both starts with the first step: what a process
needs to start is reported by the runs themselves. Ours is the sum of its steps, TRL's is read from its clock.

Rewards of single steps are noisy (each is of other prompts), so a level counts as reached where the mean of five steps
first reaches it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from vime_grpo import ConfigError, read_metrics

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: Steps whose mean reward counts as the reward there.
WINDOW = 5
_MEMORY = ("offload", "onload", "sleep", "wake")


@dataclass(frozen=True)
class Step:
    """One step of either run; seconds.

    Attributes:
        wall_s: From the beginning of the first step to the end of this one.
        step_s: The whole step.
        rollout_s: Generating and scoring, and bringing the weights to the engine.
        train_s: Forward, backward, optimiser, and in TRL's case whatever else there is.
        memory_s: Moving memory between trainer and engine; TRL was run without.
        reward: Mean over the samples.
        response_tokens: Of all samples.
    """

    wall_s: float
    step_s: float
    rollout_s: float
    train_s: float
    memory_s: float
    reward: float
    response_tokens: float


def our_steps(rows: Sequence[Mapping[str, float]], samples: int) -> list[Step]:
    """Read the steps of our metrics.

    Args:
        rows: Of ``metrics.jsonl``.
        samples: Samples a step.
    """
    ends = itertools.accumulate(row["perf/step_time"] for row in rows)
    return [
        Step(
            wall_s=end,
            step_s=row["perf/step_time"],
            rollout_s=row["perf/rollout_time"] + row["perf/update_weights_time"],
            train_s=row["perf/train_time"],
            memory_s=sum(row.get(f"perf/{name}_time", 0.0) for name in _MEMORY),
            reward=row["rollout/raw_reward"],
            response_tokens=row["rollout/response_len/mean"] * samples,
        )
        for row, end in zip(rows, ends, strict=True)
    ]


def peer_steps(report: Mapping[str, Any]) -> list[Step]:
    """Read the steps of TRL's report.

    Args:
        report: What ``peer_trl.py`` wrote.

    Raises:
        ConfigError: Several optimiser steps shared a rollout, which cannot be told apart here.
    """
    steps = report["steps"]
    if any(not step["samples"] for step in steps):
        raise ConfigError(
            "a step generated nothing", expected="one optimiser step a rollout", fix="algorithm.steps_per_rollout = 1"
        )
    return [
        Step(
            wall_s=step["wall_s"],
            step_s=step["step_s"],
            rollout_s=step["generate_s"] + step["reward_s"],
            train_s=step["train_s"],
            memory_s=0.0,
            reward=step["reward"],
            response_tokens=step["response_tokens"],
        )
        for step in steps
    ]


def seconds_to(steps: Sequence[Step], level: float) -> float | None:
    """Return when the mean reward of ``WINDOW`` steps first reached a level, None if it did not."""
    for last in range(WINDOW, len(steps) + 1):
        if statistics.fmean(step.reward for step in steps[last - WINDOW : last]) >= level:
            return steps[last - 1].wall_s
    return None


def describe(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the medians, rates and curve of one run's steps.

    Args:
        steps: At least two.
    """
    later = steps[1:]
    names = ("step_s", "rollout_s", "train_s", "memory_s", "response_tokens")
    return {
        "steps": len(steps),
        "median": {name: statistics.median(getattr(step, name) for step in later) for name in names},
        "response_tokens_per_s": sum(s.response_tokens for s in later) / sum(s.step_s for s in later),
        "wall_s": steps[-1].wall_s,
        "first_rewards": statistics.fmean(step.reward for step in steps[:WINDOW]),
        "last_rewards": statistics.fmean(step.reward for step in steps[-WINDOW:]),
        "curve": [asdict(step) for step in steps],
    }


def beside(ours: Sequence[Step], peer: Sequence[Step]) -> dict[str, Any]:
    """Compare the steps that both made.

    Args:
        ours: Our steps.
        peer: TRL's.

    Raises:
        ConfigError: Fewer than two steps are common.
    """
    common = min(len(ours), len(peer))
    if common < 2:
        raise ConfigError("nothing to compare", seen=f"{len(ours)} and {len(peer)} steps", expected="two of each")
    described = {"ours": describe(ours[:common]), "trl": describe(peer[:common])}
    first = min(run["first_rewards"] for run in described.values())
    best = min(run["last_rewards"] for run in described.values())
    levels = [round(first + (best - first) * share, 4) for share in (0.5, 1.0)]
    return {
        "common_steps": common,
        "step_time_trl_over_ours": described["trl"]["median"]["step_s"] / described["ours"]["median"]["step_s"],
        "seconds_to_reward": {
            str(level): {"ours": seconds_to(ours[:common], level), "trl": seconds_to(peer[:common], level)}
            for level in levels
        },
        **described,
    }


@app.command()
def main(
    metrics: Annotated[Path, typer.Argument(help="metrics.jsonl of our run.")],
    report: Annotated[Path, typer.Argument(help="What peer_trl.py wrote.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
) -> None:
    """Compare a run of ours with TRL's run of the same configuration."""
    peer = json.loads(report.read_text(encoding="utf-8"))
    said = peer["arguments"]
    samples = said["per_device_train_batch_size"] * said["steps_per_generation"]
    result = beside(our_steps(read_metrics(metrics), samples), peer_steps(peer))
    about = {name: peer[name] for name in ("config", "task", "hardware", "versions", "not_carried", "warnings")}
    out.write_text(json.dumps(about | {"samples_a_step": samples} | result, indent=1) + "\n", encoding="utf-8")
    for name in ("ours", "trl"):
        told = {key: value for key, value in result[name].items() if key != "curve"}
        sys.stdout.write(f"{name}: {json.dumps(told)}\n")
    sys.stdout.write(json.dumps(result["seconds_to_reward"]) + "\n")


if __name__ == "__main__":
    app()
