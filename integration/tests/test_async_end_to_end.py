"""The asynchronous pipeline with the real engines: it learns, keeps the lag, loses no prompt, and survives kills."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from integration_support import Launch, config_file, rows
from vime_grpo import read_timeline
from vime_integration.ledger import read_ledger

STEPS = 6
LAG = 1
START_S = 240.0
STEP_S = 60.0
GONE_S = 45.0
ASYNC = ("--set", "pipeline.mode=async", "--set", f"pipeline.max_weight_lag={LAG}", "--set", "algorithm.correction=tis")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twice_it_learns_and_every_prompt_is_trained_on_once(launch, tmp_path: Path) -> None:
    """An engine is killed, then the driver; the resumed run goes on to the end."""
    metrics = tmp_path / "run/metrics.jsonl"
    first: Launch = launch(str(config_file(tmp_path, steps=STEPS, save_every=2)), *ASYNC)
    first.until_step(metrics, 1, START_S)
    first.kill_an_engine()
    first.until_step(metrics, 3, START_S)
    first.process.send_signal(signal.SIGKILL)
    assert first.wait(10) == -signal.SIGKILL
    assert first.until_gone(GONE_S) == [], "the driver's death takes every process of the run with it"
    assert max(row["engine/restarts"] for row in rows(metrics)) == 1, first.text()

    second: Launch = launch("--resume", str(tmp_path / "run"))
    assert second.wait(START_S + STEPS * STEP_S) == 0, second.text()
    assert second.until_gone(GONE_S) == []

    log = rows(metrics)
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    for row in log:
        assert row["step"] - LAG <= row["rollout/version/min"] <= row["rollout/version/max"] <= row["step"], row
        assert row.get("train/on_policy_logprob_abs_diff", 0.0) < 1e-5, row
        assert row["sync/version"] == row["sync/engine_version/min"] == row["step"] + 1
    assert any(row["rollout/lag/max"] == LAG for row in log), "generation ran ahead of training"
    gain = log[-1]["rollout/raw_reward"] - log[0]["rollout/raw_reward"]
    assert gain > 0.05, f"six steps raise the reward, seen {gain:+.3f}"

    spans = read_timeline(tmp_path / "run/phases.jsonl")
    trained = {span.step: span for span in spans if span.phase == "train"}
    assert list(trained) == list(range(1, STEPS + 1)), "each step once, whatever was killed"
    assert {span.session for span in trained.values()} == {0, 1}
    generated = [span for span in spans if span.phase == "generate"]
    assert any(a.begin < b.end and b.begin < a.end for a in trained.values() for b in generated), "at the same time"

    ledger = read_ledger(tmp_path / "run/prompts.jsonl")
    assert [entry["step"] for entry in ledger] == list(range(1, STEPS + 1))
    positions = Counter(position for entry in ledger for position in entry["trained"])
    assert positions == Counter(range(32 * STEPS)), "every prompt exactly once, in the order of the data"
    replayed = [why for entry in ledger for _, why in entry["replayed"]]
    assert set(replayed) <= {"in flight when the run ended"}
