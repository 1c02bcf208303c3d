"""Arguments of a server: what vime-grpo takes them for, what the README says, what the installed vLLM makes of them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from integration_support import config_file
from vime_grpo import load_config
from vime_grpo.config.engine_arguments import FIXED, OVERRIDES, SETTINGS, model_overrides
from vime_integration.translate import cache_arguments, head_arguments
from vime_rollout import EngineConfig
from vime_sync import engine_arguments, engine_environment

WIDE = '{"head_dtype": "float32"}'


@pytest.fixture(scope="module")
def options() -> dict[str, str]:
    """The names of the engine's options -> the name of what they set."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return {name: action.dest for action in parser._actions for name in action.option_strings}


def test_every_argument_that_is_refused_is_one_of_vllms(options: dict[str, str]) -> None:
    of_the_server = {"--host", "--port"}
    assert {*SETTINGS, *FIXED, OVERRIDES} - of_the_server <= options.keys()
    assert options["-tp"] == options["--tensor-parallel-size"]
    assert options["-dp"] == options["--data-parallel-size"]


def test_a_cache_of_a_chosen_size_is_said_in_vllms_words(options: dict[str, str], tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = load_config(config_file(tmp_path, steps=1, save_every=0))
    assert config.engine.kv_cache_gib == 0.25
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(cache_arguments(config)).kv_cache_memory_bytes == 2**28
    whole = config.model_copy(update={"engine": config.engine.model_copy(update={"kv_cache_gib": None})})
    assert cache_arguments(whole) == []
    assert whole.engine.cpu_kv_cache_gib == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [OVERRIDES, WIDE],
        [f"--hf_overrides={WIDE}", OVERRIDES, '{"rope_theta": 1e6}'],
        [f"{OVERRIDES}.head_dtype", "float32", OVERRIDES, '{"rope_theta": 1e6}'],
        [OVERRIDES, WIDE, f'{OVERRIDES}.head_dtype="float16"', f"{OVERRIDES}.rope_theta=1000000"],
        ["--max-num-seqs", "64", f"{OVERRIDES}.head_dtype=model"],
    ],
)
def test_overrides_are_read_as_vllm_reads_them(arguments: list[str]) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    parser.add_argument(OVERRIDES, type=json.loads)
    parser.add_argument("--max-num-seqs")
    assert model_overrides(arguments) == parser.parse_args(arguments).hf_overrides


def test_the_command_for_an_engine_of_ones_own_is_what_a_run_would_give_it(tmp_path: Path) -> None:
    """As the README says it, word by word; what depends on the machine and the model is left out."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"(?s)```sh\n(VLLM_SERVER_DEV_MODE.*?)```", readme)
    words = shlex.split(block.replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    config = load_config(config_file(tmp_path, steps=1, save_every=0), ["engine.dtype=bfloat16"])
    ours = EngineConfig(
        model="MODEL",
        max_model_len=4096,
        arguments=(*engine_arguments(weights="dummy"), *head_arguments(config)),
        environment=engine_environment(),
    )
    assert variables.items() <= ours.child_environment({}).items()
    assert variables.keys() == {"VLLM_SERVER_DEV_MODE", *engine_environment()}
    machine = {"--served-model-name", "--dtype", "--seed", "--tensor-parallel-size", "--disable-uvicorn-access-log"}
    assert _options(words) == {
        name: value for name, value in _options(ours.command(8000)).items() if name not in machine
    }


def _options(words: list[str]) -> dict[str, str]:
    """Return options with their values; of switches the value is empty."""
    following = [*words[1:], "--"]
    return {
        word: "" if after.startswith("--") else after
        for word, after in zip(words, following, strict=True)
        if word.startswith("--")
    }
