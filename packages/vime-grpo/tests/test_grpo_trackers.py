"""TensorBoard's files read back, a real offline run of Weights & Biases, and what is said when one is missing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vime_grpo import open_trackers
from vime_grpo.config import RunConfig, load_config
from vime_grpo.errors import TrackerError
from vime_grpo.trackers import TensorBoardTracker

WANDB = ("tracking.wandb=true", "tracking.wandb_project=demo")


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.fixture
def config(run_toml: Path) -> RunConfig:
    return load_config(run_toml, ["tracking.tensorboard=true"])


def test_tensorboard_shows_every_metric_and_forgets_steps_that_are_run_again(config: RunConfig, tmp_path: Path) -> None:
    (tracker,) = open_trackers(config, tmp_path, None)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"rollout/raw_reward": step / 4, "eval/pass@1": 0.5, "train/loss": math.nan})
    tracker.close()
    assert scalars(tmp_path / "tensorboard", "rollout/raw_reward") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert math.isnan(scalars(tmp_path / "tensorboard", "train/loss")[4])
    (tracker,) = open_trackers(config, tmp_path, 2)
    tracker.log(3, {"rollout/raw_reward": 0.0})
    tracker.close()
    tracker.close()
    assert scalars(tmp_path / "tensorboard", "rollout/raw_reward") == {1: 0.25, 2: 0.5, 3: 0.0}


def test_nothing_is_opened_that_was_not_asked_for(run_toml: Path, tmp_path: Path) -> None:
    assert open_trackers(load_config(run_toml), tmp_path, None) == []
    assert list(tmp_path.glob("tensorboard")) == []


class Recorder(ModuleType):
    """Stands for the module wandb: keeps what it is told."""

    class Error(Exception):
        """As wandb.Error."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails = fails
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> Recorder:
        if self.fails:
            raise Recorder.Error(self.fails)
        self.inits.append(options)
        return self

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_run_and_a_resume_continues_it(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    folder = tmp_path / "my-run"
    for resume_step in (None, 2, None):
        (tracker,) = open_trackers(load_config(run_toml, [*WANDB]), folder, resume_step)
        tracker.log(3, {"train/loss": 0.5})
        tracker.close()
    first, resumed, fresh = recorder.inits
    assert (first["project"], first["name"], first["dir"]) == ("demo", "my-run", str(folder))
    assert first["config"]["rollout"]["batch_size"] == 8
    assert first["settings"]["init_timeout"] > 0
    assert first["id"] == resumed["id"] != fresh["id"]
    assert recorder.rows == [(3, {"train/loss": 0.5})] * 3
    assert recorder.finished == 3


def test_a_tracker_that_cannot_begin_is_named_and_the_others_are_closed(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TensorBoardTracker] = []
    monkeypatch.setattr(TensorBoardTracker, "close", lambda self: closed.append(self))
    monkeypatch.setitem(sys.modules, "wandb", Recorder(fails="no key"))
    both = load_config(run_toml, [*WANDB, "tracking.tensorboard=true"])
    with pytest.raises(TrackerError, match=r"cannot begin .*'demo'\); seen: Error: no key; fix: log in"):
        open_trackers(both, tmp_path, None)
    assert len(closed) == 1


def test_whatever_stops_a_tracker_the_others_are_closed(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TensorBoardTracker] = []
    monkeypatch.setattr(TensorBoardTracker, "close", lambda self: closed.append(self))
    monkeypatch.setitem(sys.modules, "wandb", Recorder())
    (tmp_path / "wandb-run-id").mkdir()  # where the identity of the run is to be written
    with pytest.raises(IsADirectoryError):
        open_trackers(load_config(run_toml, [*WANDB, "tracking.tensorboard=true"]), tmp_path, None)
    assert len(closed) == 1


@pytest.mark.parametrize(("extra", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_names_its_extra(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    settings = [f"tracking.{extra}=true", "tracking.wandb_project=demo"]
    with pytest.raises(TrackerError, match=rf"{extra} is not installed .*pip install 'vime-grpo\[{extra}\]'"):
        open_trackers(load_config(run_toml, settings), tmp_path, None)


REAL = """
import sys
from pathlib import Path
from vime_grpo.trackers import WandbTracker
folder = Path(sys.argv[1])
for resume_step in (None, 1):
    tracker = WandbTracker(folder, project="demo", name=None, config={"a": {"b": 1}}, resume_step=resume_step)
    tracker.log((resume_step or 0) + 1, {"rollout/raw_reward": 0.125, "eval/pass@1": 0.5})
    tracker.close()
"""


def test_a_real_run_of_wandb_without_network(tmp_path: Path) -> None:
    # In a process of its own: wandb leaves a service running for as long as its process lives.
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(tmp_path / "c"),
    }
    command = [sys.executable, "-c", REAL, str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=300, env=environment, capture_output=True)
    identity = (tmp_path / "run" / "wandb-run-id").read_text()
    records = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert records, "both runs have the identity of the folder"
    for record in records:
        content = record.read_bytes()
        assert b"rollout/raw_reward" in content
        assert b"0.125" in content
