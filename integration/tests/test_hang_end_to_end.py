"""A core that hangs in mid-generation is found by the silence, and the run is the one that it would have been.

A hung core is not dead: its server goes on to say that it is well. What tells is a request without an answer, so this
takes as long as a request may, twice; it runs when asked for: VIME_HANG=1. That a pool and an engine live through a
hang is always tested (`test_rollout_real_engine`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from integration_support import Launch, config_file, rows
from safetensors.torch import load_file

STEPS = 3
START_S = 240.0
# A stopped core's step fills a deadline, so this is what the fault costs; a healthy request needs less than a second.
SHORT = ("--set", "rollout.request_deadline_s=15", "--set", "rollout.retries=0")
SAME = ("rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm")


def core_of(run: Launch) -> psutil.Process:
    (core,) = [process for process in run.processes() if "EngineCore" in " ".join(process.cmdline())]
    return core


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif("VIME_HANG" not in os.environ, reason="two minutes more: set VIME_HANG=1")
def test_a_hung_core_is_replaced_and_its_requests_are_asked_again(launch, tmp_path: Path) -> None:
    folders = tmp_path / "calm", tmp_path / "hung"
    for folder in folders:
        folder.mkdir()
    calm: Launch = launch(str(config_file(folders[0], steps=STEPS, save_every=STEPS)), *SHORT)
    assert calm.wait(START_S) == 0, calm.text()

    hung: Launch = launch(str(config_file(folders[1], steps=STEPS, save_every=STEPS)), *SHORT)
    log = folders[1] / "run/logs/driver.log"
    hung.until_phase(log, 1, "rollout", START_S)
    core = core_of(hung)  # looked for beforehand, because a rollout takes less time than the looking
    hung.until_phase(log, 2, "rollout", START_S)
    os.kill(core.pid, signal.SIGSTOP)
    assert hung.wait(START_S) == 0, hung.text()
    assert "engine-0 is started again (1 of " in hung.text()
    assert hung.until_gone(45.0) == [], "the stopped core is gone too"

    before, after = (rows(folder / "run/metrics.jsonl") for folder in folders)
    assert max(row["engine/restarts"] for row in after) == 1
    assert [[row[name] for name in SAME] for row in after] == [[row[name] for name in SAME] for row in before]
    ours, theirs = (load_file(folder / "run/model/model.safetensors") for folder in folders)
    assert [name for name in theirs if not ours[name].equal(theirs[name])] == []
