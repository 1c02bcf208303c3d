"""What a resumed run must share with the run it continues, and what may differ.

A resumed run is the same run: its data order, its mathematics and its weights go on as if it had not stopped. So the
sections that decide them must be as they were; how many steps, how long to wait, where to show it and how many threads
to use may change.
"""

from __future__ import annotations

from typing import Any

from vime_grpo import RunConfig, load_config

from vime_integration.errors import ResumeError
from vime_integration.run_folder import RunFolder

FIXED_KEYS = {"pipeline.mode", "pipeline.max_weight_lag"}
FIXED_SECTIONS = ("model", "data", "rollout", "reward", "algorithm", "trainer")
FREE_KEYS = {
    "trainer.offload",
    "rollout.concurrency",
    "rollout.request_deadline_s",
    "rollout.retries",
    "reward.timeout_s",
    "trainer.threads",
    "trainer.step_deadline_s",
}


def check_same_run(config: RunConfig, run: RunFolder) -> None:
    """Compare a configuration with the one that the run folder holds.

    Raises:
        ResumeError: Something that decides the result differs; every such key is listed with both values.
    """
    before = load_config(run.config).model_dump(mode="json")
    now = config.model_dump(mode="json")
    changed = [
        f"{name}: {_short(before[section].get(key))} then, {_short(now[section].get(key))} now"
        for section in now
        for key in sorted(before[section].keys() | now[section].keys())
        if _is_fixed(name := f"{section}.{key}") and before[section].get(key) != now[section].get(key)
    ]
    if changed:
        raise ResumeError(
            "the run was made with another configuration",
            where=str(run.config),
            seen="; ".join(changed),
            expected="the same model, data, rollout, reward, algorithm and trainer",
            fix=f"resume with {run.config}, or start a fresh run in another run_dir",
        )


def _is_fixed(name: str) -> bool:
    return name in FIXED_KEYS or (name.partition(".")[0] in FIXED_SECTIONS and name not in FREE_KEYS)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
