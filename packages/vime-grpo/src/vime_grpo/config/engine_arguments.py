"""The vLLM server's own arguments (`engine.extra_args`), held against the settings that they would undo.

Of two arguments of one name vLLM takes the last, and the user's come last. So an argument that a setting stands for
would win without a word, and the rest of the run would go on with the setting. ``--hf-overrides`` is a table and free
to use, but it too is replaced whole: `model.head_dtype` travels in it, and logits of different types in trainer and
engines look like a policy that drifts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vime_grpo.config.generation import EngineSection, ModelSection

OVERRIDES = "--hf-overrides"
#: Arguments that are settings of a run -> the setting.
SETTINGS = {
    "--model": "model.path",
    "--dtype": "engine.dtype",
    "--max-model-len": "engine.max_model_len",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "-tp": "engine.tensor_parallel",
    "--data-parallel-size": "engine.count",
    "-dp": "engine.count",
    "--gpu-memory-utilization": "engine.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "engine.kv_cache_gib",
    "--enable-sleep-mode": "engine.sleep",
    "--weight-transfer-config": "the section [sync]",
}
#: Arguments that the run relies on and offers no choice of.
FIXED = (
    "--host",
    "--port",
    "--served-model-name",
    "--logprobs-mode",
    "--load-format",
    "--model-loader-extra-config",
    "--worker-extension-cls",
)


def argument_problems(model: ModelSection, engine: EngineSection) -> list[str]:
    """Return what is wrong with ``engine.extra_args``, beside what vLLM itself will say of them.

    Args:
        model: The policy.
        engine: Its engines.
    """
    names = {_name(argument) for argument in engine.extra_args}
    problems = [
        f"engine.extra_args holds {name}, which {SETTINGS[name]} stands for: set that, the whole run goes by it"
        for name in SETTINGS
        if name in names
    ]
    problems += [f"engine.extra_args holds {name}, which the run chooses: remove it" for name in FIXED if name in names]
    return problems + _head_problems(model, engine)


def model_overrides(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the ``--hf-overrides`` that vLLM will understand, or None where there are none.

    Dotted arguments (``--hf-overrides.key value``) are put together and replace a whole table, wherever it stands; keys
    further in are left dotted.

    Raises:
        ValueError: They are no JSON object.
    """
    whole: str | None = None
    dotted: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        if _name(argument) != OVERRIDES:
            continue
        key, equals, value = argument.partition("=")
        if not equals:
            value = arguments[place + 1] if place + 1 < len(arguments) else ""
        if "." in key:
            dotted[key.partition(".")[2]] = _read(value)
        else:
            whole = value
    if dotted or whole is None:
        return dotted or None
    table = json.loads(whole)
    if not isinstance(table, dict):
        raise ValueError("expected an object")  # noqa: TRY004 -- wrong text, not a wrong call
    return table


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:  # a bare word is text
        return value


def _name(argument: str) -> str:
    """Return an argument's name as vLLM reads it: without its value or inner keys, with dashes."""
    name = argument.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _head_problems(model: ModelSection, engine: EngineSection) -> list[str]:
    try:
        overrides = model_overrides(engine.extra_args)
    except ValueError as error:
        return [f"engine.extra_args holds {OVERRIDES} whose value is no JSON object ({error})"]
    if overrides is None:
        return []
    # "model" is the type of the weights, which is what an engine takes that is told nothing.
    seen = str(overrides.get("head_dtype", "model")).lower()
    types = [engine.dtype if each == "model" else each for each in (seen, model.head_dtype)]
    if types[0] == types[1]:
        return []
    return [
        f"engine.extra_args holds {OVERRIDES} that give the engines logits in {types[0]}, and model.head_dtype asks "
        f'for {types[1]} in trainer and engines alike: add "head_dtype": "{model.head_dtype}" to them, or set '
        "model.head_dtype"
    ]
