"""The loop that both pipelines share: what is evaluated, saved and exported when, and what a guard ends.

The processes are played by one object that keeps a list of what it was asked; the end-to-end tests have the real ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from integration_support import config_file
from vime_grpo import load_config
from vime_integration.actors.rollout import RolloutReport
from vime_integration.bundle import BundleStore
from vime_integration.entry import exit_code
from vime_integration.errors import PipelineError
from vime_integration.guarding import Guarding
from vime_integration.ledger import LedgerEntry
from vime_integration.mending import Written
from vime_integration.pipeline import Pipeline
from vime_integration.run_folder import RunFolder
from vime_integration.staleness import ON_POLICY_DIFFERENCE
from vime_sync import SyncReport

DIFFERENCE = "train/train_rollout_logprob_abs_diff"


class Processes:
    """Every process of a run, and what they were asked to do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self, checkpoint: Path | None) -> None:
        self.asked.append("start" if checkpoint is None else f"start from {checkpoint.parent.name}")

    @contextmanager
    def writing(self, version: int) -> Iterator[Written]:
        written = Written()
        yield written
        written.report = SyncReport(version, 0.1, {}, 8, "", "full", "shadow", "shm", 1)

    def ask_trainers(self, method: str, *arguments: Any, doing: str) -> list[Any]:
        self.asked.append(method)
        if method == "save":
            arguments[0].mkdir()
            (arguments[0] / "weights").write_text("w")
        return [None]

    def ask_rollout(self, method: str, *_arguments: Any, doing: str, deadline_s: float) -> Any:
        self.asked.append(method)
        return {"eval/reward": 0.5} if method == "evaluate" else {"position": 1}

    def pids(self) -> dict[str, list[int]]:
        return {"driver": [os.getpid()]}

    def counts(self) -> dict[str, float]:
        return {}


class Record:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.notes: list[str] = []
        self.spans: list[tuple[int, str, str]] = []

    def log(self, step: int, metrics: dict[str, float], rollout: RolloutReport) -> None:
        self.steps[step] = metrics

    def span(self, step: int, lane: str, phase: str, begin: float, end: float) -> None:
        assert begin <= end
        self.spans.append((step, lane, phase))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Counting(Pipeline):
    """A pipeline whose steps do nothing but count; each has the metrics it is given."""

    def tell(self, metrics: dict[str, float]) -> Counting:
        self.metrics = metrics
        return self

    def _one_step(self, phases: Any) -> tuple[dict[str, float], RolloutReport]:
        self._step += 1
        return dict(self.metrics), RolloutReport(None, {}, [("no number", 3)], [], LedgerEntry())


EVALUATED = (
    "evaluation.kind=reasoning_gym",
    "evaluation.task=chain_sum",
    "evaluation.size=8",
)


def loop(folder: Path, *overrides: str, steps: int = 5, every: int = 0, stop_after: int = 99):
    """A loop over played processes; returns it, the processes and the record."""
    config = load_config(config_file(folder, steps=steps, save_every=every), list(overrides))
    run, processes, record = RunFolder(folder / "run"), Processes(), Record()
    if not run.holds_a_run:
        run.begin()
    pipeline = Counting(config, processes, run, record, stopping=lambda: len(record.steps) >= stop_after)  # type: ignore[arg-type]
    return pipeline.tell({"rollout/raw_reward": 0.5}), processes, record


@pytest.mark.parametrize(("every", "evaluated"), [(2, [2, 4, 5]), (5, [5]), (1, [1, 2, 3, 4, 5]), (7, [5]), (0, [])])
def test_evaluated_at_intervals_and_at_the_end(tmp_path: Path, every: int, evaluated: list[int]) -> None:
    pipeline, processes, record = loop(tmp_path, *EVALUATED, f"evaluation.every={every}")
    pipeline.start(None)
    pipeline.run()
    assert [step for step, metrics in record.steps.items() if "eval/reward" in metrics] == evaluated
    assert [span for span in record.spans if span[1] == "eval"] == [(step, "eval", "evaluate") for step in evaluated]
    assert processes.asked.count("evaluate") == len(evaluated)


def test_evaluated_before_the_first_step_where_asked_and_not_after_a_resume(tmp_path: Path) -> None:
    first, processes, record = loop(tmp_path, *EVALUATED, "evaluation.at_start=true", steps=2)
    first.start(None)
    first.run()
    assert processes.asked.index("evaluate") < processes.asked.index("save")
    assert any("before training" in note for note in record.notes)
    assert processes.asked.count("evaluate") == 1
    again, processes, _ = loop(tmp_path, *EVALUATED, "evaluation.at_start=true", steps=3)
    again.start(BundleStore(tmp_path / "run/checkpoints", keep=2).latest())
    again.run()
    assert processes.asked == ["start from step-000002", "load_state_dict", "stage", "state_dict", "save", "export"]


def test_saved_at_intervals_and_once_at_the_end(tmp_path: Path) -> None:
    pipeline, processes, record = loop(tmp_path, every=2)
    pipeline.start(None)
    pipeline.run()
    assert [step for step, lane, _ in record.spans if lane == "save"] == [2, 4, 5]
    assert BundleStore(tmp_path / "run/checkpoints", keep=2).steps() == [4, 5], "two are kept"
    assert processes.asked[-1] == "export"
    assert processes.asked.count("export") == 1


def test_a_stop_saves_and_exports_nothing(tmp_path: Path) -> None:
    pipeline, processes, record = loop(tmp_path, every=2, stop_after=3)
    pipeline.start(None)
    pipeline.run()
    assert list(record.steps) == [1, 2, 3]
    assert BundleStore(tmp_path / "run/checkpoints", keep=2).steps() == [2, 3]
    assert "export" not in processes.asked


@pytest.mark.parametrize(
    ("every", "stop_after", "saved", "said"),
    [(0, 2, [], "nothing to resume from"), (2, 3, [2], "goes on after step 2"), (2, 2, [2], ""), (2, 99, [2, 4], "")],
)
def test_a_run_that_does_not_save_at_the_end_says_what_a_stop_loses(
    tmp_path: Path, every: int, stop_after: int, saved: list[int], said: str
) -> None:
    pipeline, processes, record = loop(tmp_path, "checkpoint.last=false", every=every, stop_after=stop_after)
    pipeline.start(None)
    pipeline.run()
    assert BundleStore(tmp_path / "run/checkpoints", keep=2).steps() == saved
    assert pipeline.saved_step == (saved[-1] if saved else None)
    assert [note for note in record.notes if "without a save" in note and said in note] == record.notes[1:]
    assert len(record.notes) == 1 + bool(said), "the first is about the weights"
    assert ("export" in processes.asked) == pipeline.finished
    assert exit_code(pipeline) == (0 if pipeline.finished else 75 if saved else 143)


def test_a_guard_that_stops_has_the_step_on_record_and_keeps_the_save_before(tmp_path: Path) -> None:
    pipeline, _, record = loop(tmp_path, every=1)
    pipeline.start(None)
    steps = iter([{DIFFERENCE: 1e-6}, {DIFFERENCE: 0.5}])
    pipeline._one_step = lambda phases: Counting._one_step(pipeline.tell(next(steps)), phases)  # type: ignore[method-assign]
    with pytest.raises(PipelineError, match=r"logprob_difference \(step 2\).*disagree about the log-probabilities"):
        pipeline.run()
    assert record.steps[2][DIFFERENCE] == 0.5
    assert any("disagree" in note for note in record.notes)
    assert BundleStore(tmp_path / "run/checkpoints", keep=2).steps() == [1]


def test_a_guard_that_warns_lets_the_run_go_on_and_says_why_rewards_are_zero(tmp_path: Path) -> None:
    pipeline, _, record = loop(tmp_path, "guards.zero_rewards=2", steps=3)
    pipeline.start(None)
    pipeline.tell({"rollout/raw_reward": 0.0}).run()
    assert list(record.steps) == [1, 2, 3]
    assert [note for note in record.notes if "no number (3 times)" in note]


def test_a_guard_counts_on_after_a_resume(tmp_path: Path) -> None:
    for stop_after, noted in ((1, 0), (2, 1)):
        pipeline, _, record = loop(tmp_path, "guards.zero_rewards=2", steps=2, stop_after=stop_after)
        store = BundleStore(tmp_path / "run/checkpoints", keep=2)
        pipeline.start(store.latest() if store.steps() else None)
        pipeline.tell({"rollout/raw_reward": 0.0}).run()
        assert sum("no number (3 times)" in note for note in record.notes) == noted


@pytest.mark.parametrize("reported", [None, 2])
def test_engines_that_do_not_serve_what_was_sent_end_the_run(tmp_path: Path, reported: int | None) -> None:
    pipeline, processes, _ = loop(tmp_path)

    @contextmanager
    def writing(_version: int) -> Iterator[Written]:
        written = Written()
        yield written
        if reported is not None:
            written.report = SyncReport(reported, 0.1, {}, 8, "", "full", "shadow", "shm", 1)

    processes.writing = writing  # type: ignore[method-assign]
    with pytest.raises(PipelineError, match=f"another version; seen: {reported or 'no report'}; expected: 1"):
        pipeline.start(None)


def test_old_tokens_are_not_judged_as_disagreement(tmp_path: Path) -> None:
    """Asynchronous: what training changed between two versions is no difference of kernels."""
    config = load_config(config_file(tmp_path, steps=1, save_every=0), ["pipeline.mode=async"])
    old = {DIFFERENCE: 0.5}
    assert Guarding(config).check(1, old | {ON_POLICY_DIFFERENCE: 1e-6}, []) == []
    assert Guarding(config).check(1, old, []) == [], "a step without on-policy tokens has nothing to judge"
    (alarm,) = Guarding(config).check(1, old | {ON_POLICY_DIFFERENCE: 0.5}, [])
    assert (alarm.name, alarm.action) == ("logprob_difference", "stop")
    strict = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"max_weight_lag": 0})})
    assert [alarm.name for alarm in Guarding(strict).check(1, old, [])] == ["logprob_difference"]
