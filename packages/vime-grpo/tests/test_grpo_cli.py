"""The command: what it prints, what it hands to a pipeline, and its exit codes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vime_grpo
from typer.testing import CliRunner
from vime_grpo import launch
from vime_grpo.cli import app
from vime_grpo.config import RunConfig, config_reference, load_config, save_config
from vime_grpo.errors import ConfigError, LaunchError

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register pipelines and commands for the length of a test, as installed packages would."""
    installed: list[importlib.metadata.EntryPoint] = []

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [entry for entry in installed if entry.group == group]

    monkeypatch.setattr(launch, "entry_points", entry_points)

    def add(name: str, target: object, group: str = "vime_grpo.pipelines") -> None:
        module = type(sys)(f"fake_pipeline_{name}")
        module.run = target  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        value = f"{module.__name__}:run" if target is not None else f"{module.__name__}:missing"
        installed.append(importlib.metadata.EntryPoint(name, value, group))

    return add


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_dry_run_prints_the_resolved_configuration(run_toml: Path, tmp_path: Path) -> None:
    result = invoke("train", run_toml, "--set", "rollout.batch_size=64", "--dry-run")
    assert result.exit_code == 0
    printed = tomllib.loads(result.stdout)
    assert printed["rollout"]["batch_size"] == 64
    assert printed["trainer"]["clip_grad"] == 1.0
    copy = tmp_path / "copy.toml"
    copy.write_text(result.stdout)
    assert load_config(copy) == load_config(run_toml, ["rollout.batch_size=64"])


def test_the_pipeline_gets_the_configuration_and_its_code_is_passed_on(run_toml: Path, install: Install) -> None:
    calls: list[tuple[RunConfig, Path | None]] = []

    def pipeline(config: RunConfig, *, resume: Path | None) -> int:
        calls.append((config, resume))
        return 7

    install("colocated", pipeline)
    assert invoke("train", run_toml, "--set", "pipeline.steps=9").exit_code == 7
    assert calls == [(load_config(run_toml, ["pipeline.steps=9"]), None)]


def test_resume_takes_the_folder_where_it_is_now(
    run_toml: Path, tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[RunConfig, Path | None]] = []
    install("colocated", lambda config, *, resume: calls.append((config, resume)) or 0)
    moved = tmp_path / "moved"
    moved.mkdir()
    save_config(load_config(run_toml), moved / "config.toml")
    monkeypatch.chdir(tmp_path)
    assert invoke("train", "--resume", "moved").exit_code == 0
    assert invoke("train", run_toml, "--resume", "moved", "--set", "pipeline.steps=9").exit_code == 0
    (first, folder), (second, _) = calls
    assert folder == moved
    assert first.pipeline.run_dir == second.pipeline.run_dir == moved
    assert (first.pipeline.steps, second.pipeline.steps) == (3, 9)


def test_resume_of_something_else_is_refused(tmp_path: Path) -> None:
    for folder, seen in ((tmp_path, "no config.toml"), (tmp_path / "absent", "no such folder")):
        result = invoke("train", "--resume", folder)
        assert result.exit_code == 2
        assert "not a run folder" in result.stderr
        assert seen in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["train"], "no configuration"), (["train", "absent.toml"], "does not exist"), (["trian"], "No such command")],
)
def test_wrong_command_lines_exit_with_2(arguments: list[str], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_misspelt_key_is_a_short_panel_without_traceback(run_toml: Path) -> None:
    result = invoke("train", run_toml, "--set", "rollout.batchsize=1")
    assert result.exit_code == 2
    assert "did you mean 'rollout.batch_size'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 8


def test_without_a_pipeline_package_it_says_what_to_install(run_toml: Path, install: Install) -> None:
    result = invoke("train", run_toml)
    assert result.exit_code == 3
    assert "pip install vime-integration" in result.stderr
    install("other", lambda config, *, resume: 0)
    install("broken", None)
    with pytest.raises(LaunchError, match=r"seen: installed pipelines: broken, other; fix: install the package"):
        launch.find_pipeline("colocated")
    with pytest.raises(LaunchError, match=r"'broken' cannot be imported \(fake_pipeline_broken:missing\); seen: Attr"):
        launch.find_pipeline("broken")


def test_doctor_checks_the_host_or_a_run(run_toml: Path, install: Install) -> None:
    calls: list[tuple[RunConfig | None, bool, Path | None]] = []

    def run_doctor(config: RunConfig | None, *, as_json: bool, out: Path | None) -> int:
        calls.append((config, as_json, out))
        return 4

    install("doctor", run_doctor, "vime_grpo.commands")
    assert invoke("doctor").exit_code == 4
    assert invoke("doctor", run_toml, "--set", "pipeline.steps=9", "--json", "--out", "/d.json").exit_code == 4
    assert calls == [(None, False, None), (load_config(run_toml, ["pipeline.steps=9"]), True, Path("/d.json"))]
    for arguments, text in ((["absent.toml"], "does not exist"), (["--set", "a.b=1"], "overrides without a config")):
        result = invoke("doctor", *arguments)
        assert result.exit_code == 2
        assert text in result.stderr


def test_accept_hands_over_platform_gpus_and_folder(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, Path]] = []
    install("accept", lambda *arguments: calls.append(arguments) or 0, "vime_grpo.commands")
    monkeypatch.chdir(tmp_path)
    assert invoke("accept", "--platform", "rocm", "--gpus", "8", "--out", "here").exit_code == 0
    assert invoke("accept", "--platform", "cpu").exit_code == 0
    assert calls == [("rocm", 8, tmp_path / "here"), ("cpu", 0, tmp_path / "acceptance")]
    assert invoke("accept", "--platform", "tpu").exit_code == 2
    assert invoke("accept").exit_code == 2


@pytest.mark.parametrize("arguments", [["doctor"], ["accept", "--platform", "cuda"]])
def test_without_their_package_commands_say_what_to_install(install: Install, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 3
    assert f"no installed package has a command named '{arguments[0]}'" in result.stderr
    assert "pip install vime-integration" in result.stderr


class ForeignError(Exception):
    """Like the errors of the other packages: the same fields on another base."""

    what, where, seen, expected, fix = "engine 1 died", "step 3", "signal 9", "", "see logs/engine-1.log"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ForeignError(), 4, "see logs/engine-1.log"),
        (ConfigError("the parts do not fit"), 2, "the parts do not fit"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_of_the_pipeline_have_their_codes(
    run_toml: Path, install: Install, error: BaseException, code: int, text: str
) -> None:
    def pipeline(config: RunConfig, *, resume: Path | None) -> int:
        raise error

    install("colocated", pipeline)
    result = invoke("train", run_toml)
    assert result.exit_code == code
    assert text in result.stderr


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), EOFError("marshal data too short")], ids=repr)
def test_an_unexpected_error_keeps_its_traceback(run_toml: Path, install: Install, bug: Exception) -> None:
    def pipeline(config: RunConfig, *, resume: Path | None) -> int:
        raise bug

    install("colocated", pipeline)
    result = invoke("train", run_toml)
    assert result.exit_code == 1
    assert result.exception is not None
    assert bug in (result.exception, result.exception.__cause__)


def test_config_reference_is_printed() -> None:
    assert invoke("config-reference").stdout == config_reference()
    assert "| `algorithm.correction` | `tis` | `vime_grpo.correction.truncated` |" in invoke("papers").stdout


def test_a_dry_run_imports_nothing_that_takes_seconds(run_toml: Path) -> None:
    slow = ["torch", "numpy", "matplotlib", "jinja2", "wandb", "tensorboard", "rich.live"]
    code = (
        "import sys; from vime_grpo.cli import app\n"
        f"try: app()\nfinally: print([name for name in {slow} if name in sys.modules], file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, "train", str(run_toml), "--dry-run"]
    result = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300)
    assert result.stderr.strip() == "[]"
    command = Path(sys.executable).with_name("vime-grpo")
    assert subprocess.run([command, "--help"], check=True, capture_output=True, timeout=300).stdout


def test_the_door_of_the_package_is_complete() -> None:
    for name in vime_grpo.__all__:
        assert getattr(vime_grpo, name) is not None
    assert set(vime_grpo.__all__) == set(dir(vime_grpo))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vime_grpo.nothing  # noqa: B018 - the access is the test
