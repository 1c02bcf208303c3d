"""Killed at ten points, a colocated run ends with the numbers and weights of one that was never stopped, bit for bit.

It starts the pipeline a dozen times, so it runs when asked for: VIME_KILL_POINTS=10. One kill of the driver and one
of an engine are always tested (`test_colocated_end_to_end`).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from integration_support import Launch, config_file, rows
from safetensors.torch import load_file

STEPS = 5
POINTS = [  # (step, phase whose beginning is waited for, seconds after it)
    (1, "rollout", 0.0),
    (1, "train", 0.1),
    (2, "rollout", 0.2),
    (2, "update_weights", 0.0),
    (3, "train", 0.0),
    (3, "save", 0.0),
    (4, "rollout", 0.1),
    (4, "update_weights", 0.01),
    (4, "save", 0.03),
    (5, "save", 0.06),
]
ASKED = int(os.environ.get("VIME_KILL_POINTS", "0"))
START_S = 240.0
VARIES = ("perf/", "_time", "train_rollout_logprob_abs_diff", "rollout_log_probs", "proc/", "memory/")
SMALL = ("--set", "rollout.batch_size=8", "--set", "checkpoint.keep=2")


def comparable(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in VARIES)}


def saved_step(folder: Path) -> int:
    return max([int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step-*")], default=0)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not ASKED, reason="starts the pipeline a dozen times: set VIME_KILL_POINTS=10")
def test_killed_at_every_point_it_is_the_run_that_was_never_stopped(launch, tmp_path: Path) -> None:
    folders = tmp_path / "reference", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    whole: Launch = launch(str(config_file(folders[0], steps=STEPS, save_every=1)), *SMALL)
    assert whole.wait(START_S * 3) == 0, whole.text()

    config, log = config_file(folders[1], steps=STEPS, save_every=1), folders[1] / "run/logs/driver.log"
    kills = 0

    def go_on() -> Launch:
        arguments = ("--resume", str(folders[1] / "run")) if saved_step(folders[1]) else (str(config), *SMALL)
        return launch(*arguments)

    for number, (step, phase, delay) in enumerate(POINTS[:ASKED]):
        if saved_step(folders[1]) >= step:
            continue  # the kill before came a moment after the save, which is a point as well
        log.unlink(missing_ok=True)
        run = go_on()
        run.until_phase(log, step, phase, START_S)
        time.sleep(delay)
        run.process.send_signal(signal.SIGKILL)
        assert run.wait(10) == -signal.SIGKILL, f"point {number}: the run had ended before\n{run.text()}"
        assert run.until_gone(60) == [], f"point {number}"
        kills += 1
    assert kills >= min(ASKED, 8), f"only {kills} kills"
    last = go_on()
    assert last.wait(START_S * 3) == 0, last.text()

    expected, seen = (rows(folder / "run/metrics.jsonl") for folder in folders)
    assert [comparable(row) for row in seen] == [comparable(row) for row in expected]
    ours, theirs = (load_file(folder / "run/model/model.safetensors") for folder in reversed(folders))
    assert [name for name in theirs if not ours[name].equal(theirs[name])] == []
