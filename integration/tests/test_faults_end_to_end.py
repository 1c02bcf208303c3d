"""Faults that no restart mends end a run cleanly, with a cause and a code; a resume goes on from the last save.

One run folder lives through all of it: an engine that may not be started again dies, then a trainer rank dies, then
SIGTERM stops the run. There are two trainer ranks, and the engine runs on the trainer's own memory, so that the hardest
cases are the tested ones: a rank whose peer died waits in a collective, and an aliased engine loses its weights.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from integration_support import Launch, config_file, orphaned_memory, rows
from vime_integration.ledger import read_ledger

DYNAMIC = (  # over-sampled, filtered and continued from step to step: what a resume has to bring back
    "rollout.filter=differing_rewards",
    "rollout.over_sample=2",
    "rollout.partial=true",
    "evaluation.every=2",
    "evaluation.kind=reasoning_gym",
    "evaluation.task=chain_sum",
    "evaluation.size=8",
)
START_S = 240.0
GONE_S = 45.0
LONG = ("--set", "pipeline.steps=1000", "--set", "checkpoint.every=1")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_cannot_be_mended_ends_the_run_and_a_resume_goes_on(launch, tmp_path: Path) -> None:
    before = orphaned_memory()
    metrics = tmp_path / "run/metrics.jsonl"
    config = config_file(tmp_path, steps=1000, save_every=1)
    ranks = ("--set", "trainer.data_parallel=2", "--set", "rollout.batch_size=8", "--set", "sync.mode=alias")
    ranks += tuple(word for setting in DYNAMIC for word in ("--set", setting))
    first: Launch = launch(str(config), *ranks, *LONG, "--set", "engine.restarts=0")
    first.until_step(metrics, 1, START_S)
    first.kill_an_engine()
    assert first.wait(90) == 4, first.text()
    assert "weights: alias by shm" in first.text()
    assert "engine died" in first.text()
    assert "engine-0" in first.text()
    assert "SIGKILL" in first.text() or "signal 9" in first.text() or "-9" in first.text()
    assert first.until_gone(GONE_S) == []

    done = len(rows(metrics))
    second: Launch = launch("--resume", str(tmp_path / "run"))
    second.until_step(metrics, done + 1, START_S)
    second.kill_a_trainer()
    began = time.monotonic()
    assert second.wait(90) == 4, second.text()
    seconds = time.monotonic() - began
    assert "a process of the run died" in second.text()
    assert "trainer-" in second.text()
    assert seconds < 60, f"a dead rank ends the run in half a minute on an idle machine, seen {seconds:.0f} s"
    assert second.until_gone(GONE_S) == []

    done = len(rows(metrics))
    third: Launch = launch("--resume", str(tmp_path / "run"), "--set", "pipeline.steps=1001")
    third.until_step(metrics, done + 1, START_S)
    third.process.terminate()
    assert third.wait(120) == 75, "SIGTERM saves and stops, with the code that means: resume me\n" + third.text()
    assert third.until_gone(GONE_S) == []
    last = int(rows(metrics)[-1]["step"])
    assert (tmp_path / f"run/checkpoints/step-{last:06d}/bundle.json").exists()
    log = rows(metrics)
    assert [row["step"] for row in log] == list(range(1, last + 1))
    assert all(row["rollout/zero_std/ratio"] == 0 for row in log), "groups of equal rewards were dropped"
    assert all("eval/pass@1" in row for row in log if row["step"] % 2 == 0)
    ledger = read_ledger(tmp_path / "run/prompts.jsonl")
    settled = [position for entry in ledger for position in entry["trained"]]
    settled += [position for entry in ledger for position, _ in entry["dropped"]]
    assert sorted(settled) == list(range(len(settled))), "each prompt is trained on or dropped, once"
    assert orphaned_memory() <= before, "nothing is left in shared memory"
