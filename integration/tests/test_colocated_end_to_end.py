"""The whole pipeline with the real vLLM, the real Megatron-Core and the real Ray, killed and resumed.

One uninterrupted run is the reference. A second one, with the same configuration, has its driver killed with SIGKILL
and is resumed; what it logs after that is compared with the reference, number by number.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from integration_support import POLICY, Launch, config_file, rows, shared_memory
from safetensors.torch import load_file
from vime_rollout import Encoder

STEPS = 6
SAVE_EVERY = 2
START_S = 240.0
STEP_S = 60.0
GONE_S = 45.0

# Wall times and memory differ from run to run; everything else may not. The engine's logprobs depend in their last bits
# on which requests happened to share a batch; they are only compared with, so rewards, losses and gradients do not.
VARIES = ("perf/", "_time", "train_rollout_logprob_abs_diff", "rollout_log_probs", "proc/", "engine/restarts")


def write_config(folder: Path) -> Path:
    return config_file(folder, steps=STEPS, save_every=SAVE_EVERY)


def comparable(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in VARIES)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("reference")
    run = Launch(str(write_config(folder)), output=folder / "output.txt")
    try:
        assert run.wait(START_S + STEPS * STEP_S) == 0, run.text()
        assert run.until_gone(GONE_S) == []
    finally:
        run.kill_all()
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
    assert last > first + 0.1, f"six steps raise the reward, seen {first} and then {last}"
    assert [path.name for path in sorted((reference / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert (reference / "reward.png").stat().st_size > 1000
    assert Encoder(reference / "model").eos_token_id is not None
    trained, initial = load_file(reference / "model/model.safetensors"), load_file(POLICY / "model.safetensors")
    assert trained.keys() == initial.keys()
    assert any(not trained[name].equal(initial[name]) for name in trained)
    names = {path.name for path in (reference / "logs").iterdir()}
    assert {"driver.log", "engine-0.log", "rollout.log", "trainer-0.log"} <= names


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed_it_goes_on_as_if_nothing_had_happened(reference: Path, launch, tmp_path: Path) -> None:
    before = shared_memory()
    killed: Launch = launch(str(write_config(tmp_path)))
    killed.until_step(tmp_path / "run/metrics.jsonl", SAVE_EVERY + 1, START_S)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.wait(10) == -signal.SIGKILL
    assert killed.until_gone(GONE_S) == [], "the driver's death must take every process of the run with it"

    resumed: Launch = launch("--resume", str(tmp_path / "run"))
    assert resumed.wait(START_S + STEPS * STEP_S) == 0, resumed.text()
    assert resumed.until_gone(GONE_S) == []
    expected, seen = rows(reference / "metrics.jsonl"), rows(tmp_path / "run/metrics.jsonl")
    assert [comparable(row) for row in seen] == [comparable(row) for row in expected]
    ours, theirs = (load_file(folder / "model/model.safetensors") for folder in (tmp_path / "run", reference))
    different = [name for name in theirs if not ours[name].equal(theirs[name])]
    assert different == [], "the final weights are those of the undisturbed run, bit for bit"
    assert shared_memory() <= before, "segments of the killed run are removed by the next one"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_killed_in_mid_run_is_started_again_and_changes_no_number(
    reference: Path, launch, tmp_path: Path
) -> None:
    run: Launch = launch(str(write_config(tmp_path)))
    run.until_step(tmp_path / "run/metrics.jsonl", 2, START_S)
    run.kill_an_engine()
    assert run.wait(START_S + STEPS * STEP_S) == 0, run.text()
    assert run.until_gone(GONE_S) == []
    expected, seen = rows(reference / "metrics.jsonl"), rows(tmp_path / "run/metrics.jsonl")
    assert seen[-1]["engine/restarts"] == 1, run.text()
    assert [comparable(row) for row in seen] == [comparable(row) for row in expected]
    assert "engine-0 is started again (1 of 2)" in run.text()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_killed_in_mid_run_ends_the_run_with_its_name(launch, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    never = ("--set", "engine.restarts=0")
    run: Launch = launch(str(config), "--set", "pipeline.steps=1000", "--set", "checkpoint.every=1", *never)
    run.until_step(tmp_path / "run/metrics.jsonl", 2, START_S)
    run.kill_an_engine()
    assert run.wait(90) == 4, run.text()
    text = run.text()
    assert "engine died" in text
    assert "engine-0" in text
    assert "SIGKILL" in text or "signal 9" in text or "-9" in text
    assert run.until_gone(GONE_S) == []
    # What was saved before is whole: the run can go on.
    resumed: Launch = launch("--resume", str(tmp_path / "run"), "--set", "pipeline.steps=1001")
    before = len(rows(tmp_path / "run/metrics.jsonl"))
    resumed.until_step(tmp_path / "run/metrics.jsonl", before + 1, START_S)
    resumed.process.terminate()
    assert resumed.wait(90) == 75, "SIGTERM saves and stops, with the code that means: resume me\n" + resumed.text()
    assert resumed.until_gone(GONE_S) == []
    last = rows(tmp_path / "run/metrics.jsonl")[-1]["step"]
    assert (tmp_path / f"run/checkpoints/step-{int(last):06d}/bundle.json").exists()
