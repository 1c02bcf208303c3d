"""Bad input gets a clear error before anything expensive starts, and loses nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from integration_support import POLICY, config_file
from typer.testing import CliRunner
from vime_grpo import load_config
from vime_grpo.cli import app
from vime_integration.doctor import Status
from vime_integration.doctor.configuration import check_configuration
from vime_integration.preflight import check_before_start, check_data, check_evaluation
from vime_rollout.errors import ExtensionError

CONFIG = """
[model]
path = "{model}"
[data]
kind = "jsonl"
path = "{data}"
label_key = "label"
[rollout]
batch_size = 2
samples_per_prompt = 2
max_response_tokens = 8
max_context_tokens = {context}
[engine]
dtype = "float32"
enforce_eager = true
kv_cache_gib = 0.25
start_deadline_s = 240.0
[reward]
name = "exact_match"
[algorithm]
[trainer]
dtype = "float32"
[sync]
[pipeline]
steps = 1
run_dir = "run"
[checkpoint]
[tracking]
console = "plain"
"""


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        self.data.write_text('{"prompt": "1 + 1", "label": "2"}\n{"prompt": "2 + 2", "label": "4"}\n')

    def run(self, *arguments: str, model: Path = POLICY, context: int = 64) -> tuple[int, str]:
        path = self.folder / "run.toml"
        path.write_text(CONFIG.format(model=model, data=self.data, context=context))
        result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(app, ["train", str(path), *arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_missing_model_folder(case: Case) -> None:
    code, text = case.run(model=case.folder / "nowhere")
    assert code in (2, 4)
    assert "nowhere" in text
    assert not (case.folder / "run").exists()


def test_unsupported_model_says_what_is_supported(case: Case) -> None:
    model = case.folder / "model"
    shutil.copytree(POLICY, model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "architectures": ["MambaForCausalLM"]}))
    code, text = case.run(model=model)
    assert code == 4
    assert "MambaForCausalLM" in text
    assert "Qwen3ForCausalLM" in text
    assert not (case.folder / "run").exists()


def test_broken_line_is_named_with_its_file(case: Case) -> None:
    case.data.write_text('{"prompt": "1 + 1", "label": "2"}\n{"prompt": "2 + 2", "lab\n')
    code, text = case.run()
    assert code == 4
    assert str(case.data) in text
    assert f"{case.data}:2" in text or "line 2" in text
    assert not (case.folder / "run").exists(), "it is found before anything expensive starts"


def test_empty_data_set(case: Case) -> None:
    case.data.write_text("")
    code, text = case.run()
    assert code == 4
    assert "empty" in text


@pytest.mark.slow
def test_prompt_longer_than_the_context_is_named(case: Case) -> None:
    case.data.write_text(json.dumps({"prompt": "1 + " * 200 + "1", "label": "201"}) + "\n")
    code, text = case.run()
    assert code == 4
    assert "longer than the context" in text
    assert "prompt data" in text


def test_sources_of_ones_own_are_made_as_the_rollout_makes_them(tmp_path: Path) -> None:
    """With their options and the tokenizer that they ask for; what cannot be made is told before the start."""
    own = ["data.kind=custom", "data.source=own_code:Sums", "data.options.size=40"]
    held_out = ["evaluation.every=1", "evaluation.kind=custom", "evaluation.source=own_code:Sums", "evaluation.size=8"]
    path = config_file(tmp_path, steps=1, save_every=0)
    path.write_text(re.sub(r"(?s)kind = .reasoning_gym.*?(?=\[rollout\])", "", path.read_text(), count=1))
    config = load_config(path, [*own, *held_out])
    check_before_start(config)
    assert check_data(config) == "own_code:Sums"
    assert check_evaluation(config) == "8 prompts of own_code:Sums"
    found = {check.name: check.status for check in check_configuration(config)}
    assert found["config.data"] == found["config.evaluation"] == found["config.preflight"] == Status.OK
    for wrong in ("data.options.sise=40", "evaluation.options.sise=40"):
        with pytest.raises(ExtensionError, match="sise"):
            check_before_start(load_config(path, [*own, *held_out, wrong]))


def test_a_router_that_is_not_installed_is_told_before_engines_start(case: Case, monkeypatch) -> None:
    monkeypatch.setattr("vime_integration.preflight.find_spec", lambda _name: None)
    code, text = case.run("--set", "engine.router=true")
    assert code == 4
    assert "vllm-router is not installed" in text
    assert "pip install 'vime-rollout[router]'" in text
    assert not (case.folder / "run").exists()


@pytest.mark.engine
@pytest.mark.slow
def test_engine_that_cannot_start_shows_the_end_of_its_log(case: Case) -> None:
    code, text = case.run("--set", 'engine.extra_args=["--no-such-argument"]')
    assert code == 4
    assert "engine-0" in text
    assert "no-such-argument" in text


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_resume_folder_that_is_none(case: Case, kind: str) -> None:
    folder = case.folder / "earlier"
    if kind == "file":
        folder.write_text("not a folder")
    elif kind == "empty":
        folder.mkdir()
    code, text = case.run("--resume", str(folder))
    assert code in (2, 4)
    assert "not a run folder" in text
    assert "earlier" in text


def test_resume_with_another_configuration_lists_what_differs(case: Case) -> None:
    assert case.run("--dry-run")[0] == 0
    run = case.folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    code, text = case.run("--dry-run")
    (run / "config.toml").write_text(text)
    code, text = case.run("--resume", str(run), "--set", "trainer.learning_rate=0.5", "--set", "pipeline.steps=7")
    assert code == 4
    assert "trainer.learning_rate" in text
    assert "0.5 now" in text
    assert "steps" not in text.split("seen")[1].split("expected")[0]


def test_resume_before_the_first_checkpoint(case: Case) -> None:
    run = case.folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(case.run("--dry-run")[1])
    code, text = case.run("--resume", str(run))
    assert code == 4
    assert "before its first save" in text
