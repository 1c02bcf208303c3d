"""Reading a configuration: what is right comes back equal, what is wrong is named with file, key and nearest key."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.config import AlgorithmSection, RunConfig, config_from_dict, config_reference, load_config, save_config
from vime_grpo.config.schema import fields
from vime_grpo.config.toml import dump_toml, parse_scalar
from vime_grpo.errors import ConfigError, GrpoError
from vime_grpo.papers import REGISTRIES, paper_index

Edit = Callable[[str, str], Path]


def test_a_small_file_resolves_every_setting(run_toml: Path) -> None:
    config = load_config(run_toml)
    assert config.model.path == run_toml.parent / "model"
    assert config.pipeline.run_dir == run_toml.parent.parent / "runs" / "small"
    assert config.engine.max_model_len == 128  # from rollout.max_context_tokens
    assert config.rollout.stop == ("\n\n",)
    assert config.data.task_config == {"max_terms": 2}
    assert (config.samples_per_rollout, config.samples_per_update, config.optimizer_steps) == (32, 32, 3)
    assert (config.rollout_devices, config.trainer.world_size, config.needs_reference) == (1, 1, False)


def test_resolved_configuration_reads_back_equal_from_anywhere(run_toml: Path, tmp_path: Path) -> None:
    config = load_config(run_toml, ["rollout.stop_token_ids=[1, 2]", "engine.extra_args=['--a', 'b']"])
    elsewhere = tmp_path / "elsewhere" / "config.toml"
    elsewhere.parent.mkdir()
    save_config(config, elsewhere)
    assert load_config(elsewhere) == config
    assert dump_toml(load_config(elsewhere)) == dump_toml(config)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "trainer": st.fixed_dictionaries(
                {}, optional={"learning_rate": st.floats(1e-9, 1), "seed": st.integers(0, 99), "threads": st.just(2)}
            ),
            "tracking": st.fixed_dictionaries({}, optional={"plot": st.booleans()}),
            "algorithm": st.fixed_dictionaries({}, optional={"clip_low": st.floats(0, 0.99)}),
            "reward": st.fixed_dictionaries({"path": st.just("a.b:c")}, optional={"timeout_s": st.floats(1, 9)}),
        },
    )
)
def test_any_resolved_configuration_survives_toml(changes: dict[str, dict[str, object]]) -> None:
    raw: dict[str, dict[str, object]] = {
        "model": {"path": "/m"},
        "data": {"path": "/d.jsonl", "system_prompt": 'say "hi"\n\\ \u00e9'},
        "rollout": {"batch_size": 2, "max_response_tokens": 4, "max_context_tokens": 9},
        "reward": {"name": "exact_match", "options": {"pattern": "(.*)", "nested": {"a": [1, 2.5]}}},
        "pipeline": {"steps": 1, "run_dir": "/r"},
    }
    config = config_from_dict(raw | changes)
    assert config_from_dict(tomllib.loads(dump_toml(config))) == config


def test_every_setting_has_a_doc_and_optional_ones_default_to_nothing() -> None:
    for section, key, field in fields(RunConfig):
        assert field.description, f"{section}.{key} has no description"
        if type(None) in get_args(field.annotation):
            assert field.default is None, f"{section}.{key}: TOML cannot say null, so only a default can mean it"


@pytest.mark.parametrize("setting", REGISTRIES)
def test_choices_are_exactly_what_is_registered(setting: str) -> None:
    annotation = AlgorithmSection.model_fields[setting.removeprefix("algorithm.")].annotation
    assert annotation == Literal[REGISTRIES[setting].names()]


def test_overrides_are_typed_and_the_last_one_wins(run_toml: Path) -> None:
    config = load_config(
        run_toml,
        [
            "rollout.batch_size=4",
            "rollout.batch_size = 16",
            "trainer.learning_rate=3e-4",
            "tracking.plot=false",
            "tracking.console=plain",
            'data.system_prompt="quoted"',
            "data.task_config.min_terms=1",
            "reward.options.deep.er=[1, 2]",
        ],
    )
    assert config.rollout.batch_size == 16
    assert config.trainer.learning_rate == 3e-4
    assert config.tracking.plot is False
    assert config.tracking.console == "plain"
    assert config.data.system_prompt == "quoted"
    assert config.data.task_config == {"max_terms": 2, "min_terms": 1}
    assert config.reward.options == {"deep": {"er": [1, 2]}}


def test_relative_paths_in_overrides_start_from_the_working_directory(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(run_toml, ["pipeline.run_dir=out/7"]).pipeline.run_dir == tmp_path / "out" / "7"
    assert load_config(run_toml, ["pipeline.run_dir=7"]).pipeline.run_dir == tmp_path / "7"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5", 1.5),
        ("true", True),
        ("'x'", "x"),
        ("x y", "x y"),
        ("[1, 2]", [1, 2]),
        ("", ""),
        ("{a=1}", {"a": 1}),
    ],
)
def test_values_are_toml_or_else_plain_text(text: str, value: object) -> None:
    assert parse_scalar(text) == value


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.batchsize=3", r"unknown setting 'rollout.batchsize' \(--set .*did you mean 'rollout.batch_size'"),
        ("rollout.learning_rate=1", r"did you mean 'trainer.learning_rate'"),
        ("rolout.batch_size=3", r"did you mean 'rollout.batch_size'"),
        ("rolout.q=3", r"did you mean 'rollout'"),
        ("trainer.lr=3", r"expected: one of dtype, learning_rate"),
        ("batch_size=3", r"unknown section 'batch_size'|unknown setting"),
        ("rollout.batch_size.x=3", r"unknown setting 'rollout.batch_size.x'"),
        ("rollout.batch_size", r"has no value.*section.key=value"),
        ("reward.options.=1", r"unknown setting"),
        ("data.task_config.max_terms.x=1", r"data.max_terms is no table|is no table"),
        (
            "rollout.batch_size=many",
            r"run.toml with --set, rollout.batch_size\); seen: 'many'; expected: a valid integer",
        ),
        ("rollout.batch_size=3.0", r"expected: a valid integer"),
        ("rollout.batch_size=true", r"expected: a valid integer"),
        ("rollout.batch_size=0", r"greater than or equal to 1"),
        ("rollout.temperature=0", r"greater than 0"),
        ("rollout.temperature=nan", r"finite number"),
        ("tracking.plot=1", r"valid boolean"),
        ("tracking.console=lively", r"did you mean 'live'\?"),
        ("reward.name=mathverify", r"did you mean 'math_verify'\?"),
        ("pipeline.mode=Not-A-Name", r"pattern"),
        ("rollout.stop=[1]", r"rollout.stop.0\); seen: 1; expected: a valid string"),
    ],
)
def test_wrong_overrides_are_named(run_toml: Path, override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(run_toml, [override])


def test_wrong_files_are_named(run_toml: Path, edit: Edit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist \(.*absent.toml\)"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    edit("steps = 3", "steps = 3\nmax_wheight_lag = 1")
    with pytest.raises(
        ConfigError, match=r"run.toml, section \[pipeline\]\); fix: did you mean 'pipeline.max_weight_lag'"
    ):
        load_config(run_toml)
    edit("max_wheight_lag = 1", "")
    edit("steps = 3", "steps = ")
    with pytest.raises(ConfigError, match=r"not valid TOML \(.*run.toml\); seen: Invalid value \(at line"):
        load_config(run_toml)


def test_unknown_sections_and_values_in_their_place(edit: Edit) -> None:
    with pytest.raises(ConfigError, match=r"unknown section 'optim'.*expected: one of model, data"):
        load_config(edit("[reward]", "[optim]\nlr = 1\n[reward]"))
    with pytest.raises(ConfigError, match=r"engine is a section.*seen: 3"):
        config_from_dict({"engine": 3})


def test_paths_must_be_text(edit: Edit) -> None:
    with pytest.raises(ConfigError, match=r"model.path\); seen: 3"):
        load_config(edit('path = "model"', "path = 3"))


def test_overrides_do_not_make_a_value_into_a_section(edit: Edit) -> None:
    path = edit("[reward]", "[reward.options]\nx = 1\n[reward]")
    assert load_config(path, ["reward.options.x=2"]).reward.options == {"x": 2}
    with pytest.raises(ConfigError, match=r"reward.x is no table|is no table"):
        load_config(path, ["reward.options.x.y=2"])


def test_missing_settings_are_listed_together(edit: Edit) -> None:
    path = edit("batch_size = 8\n", "")
    with pytest.raises(ConfigError, match=r"rollout.batch_size\); expected: to be set: it has no default"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"(?s)2 wrong settings.*rollout.batch_size: to be set.*pipeline.steps: .*0"):
        load_config(path, ["pipeline.steps=0"])


def test_importing_the_configuration_imports_no_torch() -> None:
    code = "import sys, vime_grpo.cli, vime_grpo.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_reference_page_is_current() -> None:
    page = Path(__file__).parents[1] / "CONFIG.md"
    assert page.read_text(encoding="utf-8") == config_reference(), "run: vime-grpo config-reference > CONFIG.md"


def test_paper_index_is_current_and_every_choice_has_a_paper() -> None:
    page = Path(__file__).parents[1] / "PAPERS.md"
    assert page.read_text(encoding="utf-8") == paper_index(), "run: vime-grpo papers > PAPERS.md"
    for registry in REGISTRIES.values():
        assert all(entry.paper for entry in registry)


def test_errors_survive_pickling() -> None:
    error = ConfigError("what", where="w", seen="s", expected="e", fix="f")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.what, copy.fix, str(copy)) == (ConfigError, "what", "f", str(error))
    assert str(GrpoError("only this")) == "only this"
