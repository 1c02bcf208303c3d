"""The acceptance: every stage is judged, none hides another, and what is written says what was seen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_devices import Platform
from vime_grpo import ConfigError
from vime_integration.accept import STAGES, Acceptance, Outcome, Report, StageResult, Threshold, run_accept, supervise
from vime_integration.accept import runs as runs_module
from vime_integration.accept.page import write_page
from vime_integration.accept.runs import Mode, layout, overrides, run_config, run_folder
from vime_integration.accept.stage_runs import (
    DIFFERENCE,
    ON_POLICY_DIFFERENCE,
    judge_run,
    logprob_difference,
    throughput,
)
from vime_integration.accept.supervise import Stage, run_stage
from vime_integration.fleet import Fleet
from vime_integration.placement import place
from vime_integration.run_folder import RunFolder
from vime_integration.sharing import choose

Runner = Callable[..., StageResult]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    """Run one of `accept_stages` in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(name: str, deadline_s: float = 120.0) -> StageResult:
        return run_stage(
            Stage(name, f"accept_stages:{name}", deadline_s, "a test"), Acceptance("cpu", 0, tmp_path, steps=3)
        )

    return run


def test_a_stage_that_passes_keeps_its_figures_and_its_log(stage: Runner, tmp_path: Path) -> None:
    result = stage("passes")
    assert (result.outcome, result.reason) == (Outcome.PASS, "")
    assert result.to_json()["figures"] == {"steps": 3}
    assert (tmp_path / result.log).read_text() == "said on the way\n"


@pytest.mark.parametrize(
    ("name", "outcome", "text"),
    [
        ("compares_nothing", Outcome.FAIL, "nothing was compared"),
        ("is_below", Outcome.FAIL, "speed: 3 GB/s, expected at least 5"),
        ("is_skipped", Outcome.SKIP, "one GPU"),
        ("raises", Outcome.FAIL, "ValueError: a bad value"),
        ("aborts", Outcome.FAIL, "about to abort"),
        ("is_not_there", Outcome.FAIL, "has no attribute 'is_not_there'"),
    ],
)
def test_whatever_a_stage_does_it_has_a_result_with_the_reason(
    stage: Runner, name: str, outcome: Outcome, text: str
) -> None:
    result = stage(name)
    assert result.outcome is outcome
    assert text in result.reason


def gone(folder: Path) -> bool:
    """Whether the child that a stage started, if it came to that, is no longer running."""
    file = folder / "child"
    if not file.exists():
        return True
    try:
        return psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_stage_that_hangs_is_ended_with_everything_it_started(stage: Runner, tmp_path: Path) -> None:
    result = stage("hangs", deadline_s=3.0)
    assert result.outcome is Outcome.FAIL
    assert "no end within 3 s" in result.reason
    assert gone(tmp_path)


def test_what_a_stage_leaves_running_is_ended_and_its_report_counts(
    stage: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 60.0)
    result = stage("leaves_a_child")
    assert result.outcome is Outcome.PASS
    assert (tmp_path / "child").exists()
    assert gone(tmp_path)


ENDED = """
import sys
from pathlib import Path
from vime_integration.accept import Acceptance
from vime_integration.accept.supervise import Stage, ending_with_sigterm, run_stage
with ending_with_sigterm():
    run_stage(Stage("hangs", "accept_stages:hangs", 600.0, ""), Acceptance("cpu", 0, Path(sys.argv[1])))
"""


def test_ending_the_command_ends_the_stage_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    command = subprocess.Popen([sys.executable, "-c", ENDED, str(tmp_path)])
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            assert time.monotonic() < end, "the stage did not begin"
            time.sleep(0.05)
        command.terminate()
        assert command.wait(120) == 128 + signal.SIGTERM
        assert gone(tmp_path)
    finally:
        command.kill()


def test_an_old_report_is_not_taken_for_a_new_one(stage: Runner, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/aborts.json").write_text(
        json.dumps({"thresholds": [], "figures": {}, "notes": [], "skipped": ""})
    )
    assert "without a report" in stage("aborts").reason


def test_a_failed_stage_hides_none_after_it_and_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_accept("cpu", 0, out, steps=3, only=["logprob_difference", "mask_ab", "throughput"]) == 4
    manifest = json.loads((out / "manifest.json").read_text())
    outcomes = {stage["name"]: stage["outcome"] for stage in manifest["stages"]}
    assert list(outcomes) == [stage.name for stage in STAGES]
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "skip"} == {
        "mask_ab": "pass",
        "logprob_difference": "fail",
        "throughput": "fail",
    }
    assert manifest["passed"] is False
    assert manifest["about"]["packages"]["torch"]
    assert manifest["about"]["host"]["cores"] >= 1
    page = (out / "page.md").read_text()
    assert page.startswith("# Acceptance on cpu: FAILED")
    assert "emulated: no AMD GPU took part" in page
    assert "hipErrorInvalidValue" in page
    assert "FAILED" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds an acceptance already"):
        run_accept("cpu", 0, out)


def test_what_was_shown_is_on_disk_before_the_next_stage_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, bool | None]] = []

    def interrupted(stage: Stage, acceptance: Acceptance) -> StageResult:
        file = acceptance.out / "manifest.json"
        if file.exists():
            manifest = json.loads(file.read_text())
            seen.append((len(manifest["stages"]), manifest["passed"]))
        if stage.name == "ipc_probe":
            raise KeyboardInterrupt
        return StageResult(stage.name, Outcome.PASS, 1.0, "", Report([Threshold("x", "1", "1", holds=True)]), "")

    monkeypatch.setattr("vime_integration.accept.command.run_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_accept("cpu", 0, tmp_path / "out")
    assert seen == [(1, None), (2, None)], "an acceptance that was cut off has neither passed nor failed"


@pytest.mark.parametrize(
    ("platform", "gpus", "more", "text"),
    [
        ("tpu", 0, {}, "no such platform"),
        ("cpu", -1, {}, "not a count"),
        ("cpu", 0, {"steps": 0}, "not a count"),
        ("cpu", 0, {"only": ["doctors"]}, "no such stage"),
    ],
)
def test_a_wrong_request_does_nothing(tmp_path: Path, platform: str, gpus: int, more: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_accept(platform, gpus, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


@given(count=st.integers(1, 64))
def test_ranks_and_engines_fit_and_divide_the_batch(count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_module, "usable_gpus", lambda _acceptance: count)
        there = Acceptance("rocm", 0, Path("/nowhere"))
        ranks, engines = layout(there, Mode.COLOCATED)
        assert ranks == engines <= count < 2 * ranks
        assert ranks & (ranks - 1) == 0
        if count > 1:
            ranks, engines = layout(there, Mode.ASYNC)
            assert ranks + engines <= count


def test_a_run_is_the_documented_example_with_as_little_changed_as_can_be(tmp_path: Path) -> None:
    here = Acceptance("cpu", 0, tmp_path, steps=3)
    config = run_config(here, Mode.COLOCATED)
    assert config.pipeline.steps == 3
    assert config.pipeline.run_dir == run_folder(here, Mode.COLOCATED)
    assert config.trainer.dtype == "float32"
    assert not [text for text in overrides(here, Mode.COLOCATED) if "dtype" in text]


def test_one_gpu_is_shared_by_an_asynchronous_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "pipeline.pools=shared" in overrides(Acceptance("cuda", 1, tmp_path), Mode.ASYNC)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "pipeline.pools=shared" not in overrides(Acceptance("cuda", 2, tmp_path), Mode.ASYNC)


@pytest.mark.parametrize("mode", list(Mode))
def test_an_engine_has_the_demos_cache_on_a_gpu_too_and_not_the_whole_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode
) -> None:
    """Each pause walks every block of a cache, and a large cache of this small model has ten million."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    there = run_config(Acceptance("cuda", 1, tmp_path), mode)
    seats = place(there, Platform.CUDA)
    fleet = Fleet(there, seats, RunFolder(tmp_path / "run"))
    (seat,) = seats.engines
    command = fleet._engine_config(seat, choose(there, seats)).command(8000)
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2**28)
    assert "--gpu-memory-utilization" in command
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    here = run_config(Acceptance("cpu", 0, tmp_path), mode)
    assert here.engine.kv_cache_gib == there.engine.kv_cache_gib == 0.25
    seats = place(here, Platform.CPU)
    fleet = Fleet(here, seats, RunFolder(tmp_path / "run"))
    command = fleet._engine_config(seats.engines[0], choose(here, seats)).command(8000)
    assert command.count("--kv-cache-memory-bytes") == 1, "a CPU's engine says it for itself"


def test_a_run_has_to_end_well_to_log_every_step_and_to_learn() -> None:
    rows = [{"step": step, "train/grad_norm": 0.1 * (step > 1)} for step in (1, 2, 3)]
    assert all(threshold.holds for threshold in judge_run(0, rows, 3))
    assert [t.name for t in judge_run(4, rows, 3) if not t.holds] == ["exit status"]
    assert [t.name for t in judge_run(0, rows[:2], 3) if not t.holds] == ["steps logged"]
    flat = [{**row, "train/grad_norm": 0.0} for row in rows]
    assert [t.name for t in judge_run(0, flat, 3) if not t.holds] == ["steps with a gradient"]


def logged(acceptance: Acceptance, mode: Mode, *rows: dict[str, float]) -> None:
    folder = run_folder(acceptance, mode)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_difference_is_judged_on_tokens_of_the_same_weights(tmp_path: Path) -> None:
    here = Acceptance("rocm", 2, tmp_path)
    logged(here, Mode.COLOCATED, {"step": 1, DIFFERENCE: 0.004}, {"step": 2, DIFFERENCE: 0.006})
    logged(here, Mode.ASYNC, {"step": 1, DIFFERENCE: 0.5, ON_POLICY_DIFFERENCE: 0.02})
    report = logprob_difference(here)
    assert [(t.name, t.holds) for t in report.thresholds] == [("colocated, mean", True), ("async, mean", False)]
    assert report.figures["colocated"]["mean"] == pytest.approx(0.005)
    assert here.devices is Platform.HIP


def test_a_run_without_the_metric_or_without_tokens_does_not_pass(tmp_path: Path) -> None:
    here = Acceptance("cpu", 0, tmp_path)
    logged(here, Mode.COLOCATED, {"step": 1, "perf/tokens_per_gpu_per_sec": 0.0})
    assert [t.holds for t in logprob_difference(here).thresholds] == [False]
    assert [t.holds for t in throughput(here).thresholds] == [False]


def test_speeds_leave_the_first_step_out(tmp_path: Path) -> None:
    here = Acceptance("cpu", 0, tmp_path)
    rates = (1.0, 100.0, 300.0, 200.0)
    rows = [{"step": i, "perf/tokens_per_gpu_per_sec": rate} for i, rate in enumerate(rates, 1)]
    logged(here, Mode.COLOCATED, *rows)
    assert throughput(here).figures["colocated"]["perf/tokens_per_gpu_per_sec"] == 200.0


def test_the_page_survives_any_text_of_a_stage() -> None:
    stage = {
        "name": "odd", "outcome": "fail", "seconds": 1.0, "reason": "a | b\nc" * 200, "title": "t", "notes": ["n"],
        "thresholds": [{"name": "a|b", "seen": "1\n2", "expected": "", "holds": False}],
        "figures": {"table": ["head", "", "| a |", "|---|", "| 1 |"], "empty": [], "nested": {"k": 1.23456789}},
    }  # fmt: skip
    about = {"host": {"cpu": "x"}, "devices": [], "runtime": {}, "packages": {}, "commits": {}}
    manifest = {"platform": "cpu", "steps": 1, "started": "", "finished": "", "passed": False}
    manifest |= {"about": about, "stages": [stage]}
    page = write_page(manifest)
    rows = [line for line in page.splitlines() if line.startswith("| odd")]
    assert len(rows) == 2
    assert all(row.count("|") in (5, 6) for row in rows)
    assert "| 1 |" in page
    assert "k 1.23457" in page
