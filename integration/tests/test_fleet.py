"""What the driver makes of a rollout that failed: the death that caused it, or the failure itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integration_support import config_file
from vime_devices import Platform, VimeError
from vime_grpo import load_config
from vime_integration import fleet as module
from vime_integration.errors import PipelineError
from vime_integration.fleet import Fleet
from vime_integration.placement import place
from vime_integration.run_folder import RunFolder


class Trainers:
    """Watches the trainer ranks, one of which may be dead."""

    def __init__(self, told: VimeError | None) -> None:
        self.told = told

    def check_trainers(self) -> None:
        if self.told is not None:
            raise self.told


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fleet whose rollout fails with an error, beside trainers that live or not."""

    def make(error: Exception, told: VimeError | None) -> Fleet:
        config = load_config(config_file(tmp_path, steps=1, save_every=0))
        fleet = Fleet(config, place(config, Platform.CPU, {}), RunFolder(tmp_path / "run"))
        fleet.rollout = SimpleNamespace(collect=SimpleNamespace(remote=lambda *_arguments: "a reference"))
        fleet._mending = Trainers(told)  # type: ignore[assignment]

        def gather(*_arguments: Any, **_settings: Any) -> None:
            raise error

        monkeypatch.setattr(module, "gather", gather)
        return fleet

    return make


def test_a_failure_with_everybody_alive_is_raised_as_it_is(failing) -> None:
    error = ValueError("the reward divides by zero")
    with pytest.raises(ValueError, match="divides by zero") as caught:
        failing(error, None).ask_rollout("collect", 1, doing="make the rollout", deadline_s=1)
    assert caught.value is error
    assert caught.value.__cause__ is None, "an error is not its own cause"


def test_a_death_is_told_with_what_it_broke_as_its_cause(failing) -> None:
    error, told = ValueError("connection lost"), PipelineError("a process of the run died", where="trainer-0")
    with pytest.raises(PipelineError, match="trainer-0") as caught:
        failing(error, told).ask_rollout("collect", 1, doing="make the rollout", deadline_s=1)
    assert caught.value.__cause__ is error
