"""The GRPO runs of the acceptance: which configuration each mode uses, and what a run leaves to be judged.

The examples of the repository are the configurations, so that what is accepted is what is documented. Overrides are the
least that the machine asks for: number of steps, the run folder, bfloat16 on a GPU, and as many ranks and engines as
there are GPUs. The guard of the logprob difference only warns: its figure is what a later stage judges.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from vime_devices import Platform, visible_devices
from vime_grpo import ConfigError, RunConfig, load_config

from vime_integration.accept.record import Acceptance

#: Where the examples are, if they are not beside the package or in the working directory.
EXAMPLES_VARIABLE = "VIME_EXAMPLES"
#: Most that trainer and engine may disagree, nats a token.
# float32 on both sides of one CPU leaves rounding; bfloat16 on a GPU: the figure of the published run on MI355X.
LIMITS = {Platform.CPU: 1e-4, Platform.HIP: 0.012, Platform.CUDA: 0.012}


class Mode(StrEnum):
    """A pipeline."""

    COLOCATED = "colocated"
    ASYNC = "async"


EXAMPLES = {Mode.COLOCATED: "demo_cpu.toml", Mode.ASYNC: "demo_async_cpu.toml"}


def usable_gpus(acceptance: Acceptance) -> int:
    """Return how many GPUs the acceptance may use: those asked for, at most those visible; 0 on a CPU."""
    if acceptance.devices is Platform.CPU:
        return 0
    there = len(visible_devices(acceptance.devices, os.environ))
    return min(acceptance.gpus, there) if acceptance.gpus else there


def examples_folder() -> Path:
    """Find the examples: named by the environment, beside the package in a checkout, or under the working directory.

    Raises:
        ConfigError: They are nowhere.
    """
    beside = Path(__file__).resolve().parents[3] / "examples"
    places = [beside, Path.cwd() / "integration" / "examples", Path("/opt/vime/src/integration/examples")]
    if named := os.environ.get(EXAMPLES_VARIABLE):
        places.insert(0, Path(named))
    for place in places:
        if (place / EXAMPLES[Mode.COLOCATED]).is_file():
            return place
    raise ConfigError(
        "the example configurations are not here",
        seen=", ".join(map(str, places)),
        expected=f"a folder with {EXAMPLES[Mode.COLOCATED]}",
        fix=f"run it in a checkout of the repository, or set {EXAMPLES_VARIABLE} to its integration/examples",
    )


def run_folder(acceptance: Acceptance, mode: Mode) -> Path:
    """Return the run folder of a mode."""
    return acceptance.out.absolute() / "runs" / mode.value


def example(mode: Mode) -> Path:
    """Return the configuration file of a mode.

    Raises:
        ConfigError: There is none.
    """
    path = examples_folder() / EXAMPLES[mode]
    if not path.is_file():
        raise ConfigError(
            f"there is no example of the {mode.value} pipeline",
            where=str(path.parent),
            expected=path.name,
            fix="update the checkout",
        )
    return path


def layout(acceptance: Acceptance, mode: Mode) -> tuple[int, int]:
    """Return trainer ranks and engines: each on every GPU, or half of them apart; a single GPU is shared.

    Powers of two, because the batch has to divide; on a CPU one of each.
    """
    gpus = usable_gpus(acceptance)
    if acceptance.devices is Platform.CPU:
        return 1, 1
    side = gpus // 2 if mode is Mode.ASYNC else gpus
    ranks = 1 << (max(1, side).bit_length() - 1)
    return ranks, ranks


def overrides(acceptance: Acceptance, mode: Mode) -> list[str]:
    """Return what the run changes of its example, as ``--set`` takes it."""
    ranks, engines = layout(acceptance, mode)
    found = [
        f"pipeline.steps={acceptance.steps}",
        f"pipeline.run_dir={run_folder(acceptance, mode)}",
        "checkpoint.every=0",
        "tracking.console=plain",
        "guards.logprob_difference_action=warn",
        f"trainer.data_parallel={ranks}",
        f"engine.count={engines}",
    ]
    if acceptance.devices is not Platform.CPU:
        found += ["trainer.dtype=bfloat16", "engine.dtype=bfloat16"]
        found += [f"guards.logprob_difference={LIMITS[acceptance.devices]}"]  # the example's is for float32
        if mode is Mode.ASYNC and usable_gpus(acceptance) < 2:
            found += ["pipeline.pools=shared"]
    return found


def run_config(acceptance: Acceptance, mode: Mode) -> RunConfig:
    """Return the resolved configuration of a mode.

    Raises:
        ConfigError: There is no example, or the overrides do not fit it.
    """
    return load_config(example(mode), overrides(acceptance, mode))


def metrics_of(acceptance: Acceptance, mode: Mode) -> list[dict[str, Any]]:
    """Return the metrics that a run logged, one object a step; none where it has not run."""
    path = run_folder(acceptance, mode) / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
