"""The whole pipeline with the real vLLM, the real Megatron-Core and the real Ray, killed and resumed.

One uninterrupted run is the reference; it uses two engines that somebody else started, behind vllm-router. A second
one, with an engine of its own, has that and its driver killed with SIGKILL and is resumed; what it logs is compared
with the reference, number by number. Prompts, reward, filter and generate function are the user's own code in both.
"""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from integration_support import POLICY, Launch, SomebodyElse, orphaned_memory, own_config_file, rows
from safetensors.torch import load_file
from vime_grpo import read_samples, read_timeline
from vime_integration.ledger import read_ledger
from vime_rollout import Encoder

STEPS = 4
ENGINES = 2
SAVE_EVERY = 2
START_S = 240.0
STEP_S = 60.0
GONE_S = 45.0
CLOCK_S = 1e-3  # times are rounded to a tenth of a millisecond

# Wall times and memory differ from run to run; everything else may not. The engine's logprobs depend in their last bits
# on which requests happened to share a batch; they are only compared with, so rewards, losses and gradients do not. And
# two engines read the weights twice.
VARIES = (
    "perf/",
    "_time",
    "train_rollout_logprob_abs_diff",
    "rollout_log_probs",
    "proc/",
    "memory/",
    "engine/restarts",
    "sync/bytes",
)


def write_config(folder: Path) -> Path:
    return own_config_file(folder, steps=STEPS, save_every=SAVE_EVERY)


def comparable(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in VARIES)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed, with engines that it did not start, and does not end."""
    folder = tmp_path_factory.mktemp("reference")
    somebody = SomebodyElse(folder, ENGINES)
    try:
        urls = somebody.says()
        foreign = ["engine.count=0", f"engine.urls={json.dumps(urls)}", "engine.router=true"]
        arguments = [word for setting in foreign for word in ("--set", setting)]
        run = Launch(str(write_config(folder)), *arguments, output=folder / "output.txt")
        try:
            assert run.wait(START_S + STEPS * STEP_S) == 0, run.text()
            assert run.until_gone(GONE_S) == []
        finally:
            run.kill_all()
        after = somebody.engines()
        assert [version for version, _ in after] == [STEPS + 1] * ENGINES, "they live, and serve the last weights"
        # Of the 32 prompts of a step, whether their samples travel alone or together.
        assert all(answered > 32 * STEPS / 10 for _, answered in after), f"both took part: {after}"
    finally:
        somebody.end()
    return folder / "run"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_learns_agrees_and_leaves_what_it_promises(reference: Path) -> None:
    log = rows(reference / "metrics.jsonl")
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    for row in log:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5, row
        # Every token was sampled under the version that the step asked for, and the next one was committed.
        assert row["rollout/version/min"] == row["rollout/version/max"] == row["step"]
        assert row["sync/version"] == row["step"] + 1
        assert row["train/grad_norm"] > 0
    first, last = log[0]["rollout/raw_reward"], log[-1]["rollout/raw_reward"]
    assert 0.15 < first < 0.5, f"the policy starts near 0.3, seen {first}"
    assert last > first + 0.05, f"four steps raise the reward, seen {first} and then {last}"
    assert [path.name for path in sorted((reference / "checkpoints").iterdir())] == ["step-000002", "step-000004"]
    assert [entry["trained"] for entry in read_ledger(reference / "prompts.jsonl")] == [
        list(range(32 * step, 32 * (step + 1))) for step in range(STEPS)
    ]
    assert {record.rank for _, record in read_samples(reference / "samples.jsonl")} == {"best", "worst"}
    for step in range(1, STEPS + 1):
        spans = {span.phase: span for span in read_timeline(reference / "phases.jsonl") if span.step == step}
        order = [spans[phase] for phase in ("rollout", "logprobs", "train", "stage", "update_weights")]
        assert all(a.end <= b.begin + CLOCK_S for a, b in pairwise(order)), "one after the other, by one clock"
        assert ("save" in spans) == (step % SAVE_EVERY == 0)
    assert (reference / "reward.png").stat().st_size > 1000
    assert Encoder(reference / "model").eos_token_id is not None
    trained, initial = load_file(reference / "model/model.safetensors"), load_file(POLICY / "model.safetensors")
    assert trained.keys() == initial.keys()
    assert any(not trained[name].equal(initial[name]) for name in trained)
    names = {path.name for path in (reference / "logs").iterdir()}
    assert {"driver.log", "router.log", "rollout.log", "trainer-0.log"} <= names
    for row in log[SAVE_EVERY - 1 :: SAVE_EVERY]:
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= 1
        assert row["eval/samples"] == 16


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_and_driver_killed_it_goes_on_as_if_nothing_had_happened(
    reference: Path, launch, tmp_path: Path
) -> None:
    """The engine dies and is started again; then the driver dies, and the run is resumed. No number differs."""
    before = orphaned_memory()
    killed: Launch = launch(str(write_config(tmp_path)))
    killed.until_step(tmp_path / "run/metrics.jsonl", 1, START_S)
    killed.kill_an_engine()
    killed.until_step(tmp_path / "run/metrics.jsonl", SAVE_EVERY + 1, START_S)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.wait(10) == -signal.SIGKILL
    assert killed.until_gone(GONE_S) == [], "the driver's death must take every process of the run with it"
    assert rows(tmp_path / "run/metrics.jsonl")[SAVE_EVERY]["engine/restarts"] == 1, killed.text()
    assert "engine-0 is started again (1 of 2)" in killed.text()

    resumed: Launch = launch("--resume", str(tmp_path / "run"))
    assert resumed.wait(START_S + STEPS * STEP_S) == 0, resumed.text()
    assert resumed.until_gone(GONE_S) == []
    expected, seen = rows(reference / "metrics.jsonl"), rows(tmp_path / "run/metrics.jsonl")
    assert [comparable(row) for row in seen] == [comparable(row) for row in expected]
    assert (tmp_path / "run/prompts.jsonl").read_text() == (reference / "prompts.jsonl").read_text()
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (tmp_path / "run", reference))
    different = [name for name in theirs if not ours[name].equal(theirs[name])]
    assert different == [], "the final weights are those of the undisturbed run, bit for bit"
    assert orphaned_memory() <= before, "segments of the killed run are removed by the next one"
