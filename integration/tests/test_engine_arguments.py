"""What vime-grpo takes a server's arguments for is what the installed vLLM makes of them."""

from __future__ import annotations

import json

import pytest
from vime_grpo.config.engine_arguments import FIXED, OVERRIDES, SETTINGS, model_overrides

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
