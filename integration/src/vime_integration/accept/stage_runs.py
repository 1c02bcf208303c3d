"""Stages ``grpo_colocated``, ``grpo_async``, ``logprob_difference`` and ``throughput``.

A run is the real command, ``vime-grpo train``, in a process of its own. It has to end with 0, to log every step, and to
have made gradients. How well trainer and engine agree and how fast it was is judged from what it logged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from vime_integration.accept.output import say
from vime_integration.accept.record import Acceptance, Report, Threshold
from vime_integration.accept.runs import LIMITS, Mode, example, metrics_of, overrides

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
ON_POLICY_DIFFERENCE = "train/on_policy_logprob_abs_diff"
AIM = 0.005
_NOTHING = Threshold("runs that logged a step", "0", "1 or more", holds=False)
LAUNCH = "from vime_grpo.cli import main; main()"
SPEEDS = ("perf/tokens_per_gpu_per_sec", "perf/step_time", "perf/rollout_time", "perf/train_time",
          "perf/update_weights_time", "perf/actor_train_tok_per_s", "perf/wait_for_rollout_time")  # fmt: skip


def grpo_colocated(acceptance: Acceptance) -> Report:
    """Run the colocated pipeline."""
    return _run(acceptance, Mode.COLOCATED)


def grpo_async(acceptance: Acceptance) -> Report:
    """Run the asynchronous pipeline; on disjoint pools, if there are two GPUs."""
    return _run(acceptance, Mode.ASYNC)


def logprob_difference(acceptance: Acceptance) -> Report:
    """Judge how far trainer and engine disagree about the tokens that the engine sampled."""
    limit = LIMITS[acceptance.devices]
    thresholds, figures = [], {}
    for mode, rows in _finished(acceptance).items():
        name = ON_POLICY_DIFFERENCE if mode is Mode.ASYNC else DIFFERENCE
        values = [row[name] for row in rows if name in row]
        if not values:
            thresholds.append(Threshold(f"{mode.value}, mean", f"no step logged {name}", f"at most {limit:g}", False))
            continue
        figures[mode.value] = {"mean": fmean(values), "max": max(values), "last": values[-1], "steps": len(values)}
        mean = fmean(values)
        thresholds.append(Threshold(f"{mode.value}, mean", f"{mean:.3g} nats", f"at most {limit:g}", mean <= limit))
    return Report(thresholds or [_NOTHING], figures | {"aim": AIM})


def throughput(acceptance: Acceptance) -> Report:
    """Record how fast the runs were, the first step left out; judged is only that tokens came at all."""
    thresholds, figures = [], {}
    for mode, rows in _finished(acceptance).items():
        steady = rows[1:] or rows
        found = {name: round(median(row[name] for row in steady), 4) for name in SPEEDS if name in steady[-1]}
        figures[mode.value] = found
        rate = found.get("perf/tokens_per_gpu_per_sec", 0.0)
        thresholds.append(
            Threshold(f"{mode.value}, tokens per device and second", f"{rate:g}", "more than 0", rate > 0)
        )
    return Report(thresholds or [_NOTHING], figures, ("medians over the steps, the first left out",))


def _run(acceptance: Acceptance, mode: Mode) -> Report:
    changed = overrides(acceptance, mode)
    command = [sys.executable, "-c", LAUNCH, "train", str(example(mode))]
    command += [part for text in changed for part in ("--set", text)]
    say(" ".join(command))
    # In this stage's process group and without a deadline of its own: the stage's ends both.
    done = subprocess.run(command, env=dict(os.environ), check=False)  # noqa: S603 - our own launcher
    rows = metrics_of(acceptance, mode)
    return Report(judge_run(done.returncode, rows, acceptance.steps), _summary(rows))


def judge_run(status: int, rows: Sequence[Mapping[str, Any]], steps: int) -> list[Threshold]:
    """Compare a finished run with what it promised.

    Args:
        status: Exit status of the launcher.
        rows: Its metrics, one object a step.
        steps: How many it was asked for.
    """
    logged = [int(row["step"]) for row in rows]
    norms = [row.get("train/grad_norm", 0.0) for row in rows]
    return [
        Threshold("exit status", str(status), "0", status == 0),
        Threshold("steps logged", f"{len(logged)}", f"{steps}, in order", logged == list(range(1, steps + 1))),
        Threshold(
            "steps with a gradient", f"{sum(norm > 0 for norm in norms)}", "one or more", any(n > 0 for n in norms)
        ),
    ]


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]
    if not rewards:
        return {"steps": len(rows)}
    return {"steps": len(rows), "reward_first": rewards[0], "reward_last": rewards[-1], "reward_best": max(rewards)}


def _finished(acceptance: Acceptance) -> dict[Mode, list[dict[str, Any]]]:
    return {mode: rows for mode in Mode if (rows := metrics_of(acceptance, mode))}
