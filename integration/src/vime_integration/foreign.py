"""Engines that somebody else started (`engine.urls`): asked whether they fit the run, before anything is started.

The run's own engines get what it needs as arguments. Somebody else's have what their owner gave them, and some of that
shows only as log-probabilities that drift from the trainer's. vLLM tells its configuration under ``/server_info``, a
development route as those for pauses and weights are (``VLLM_SERVER_DEV_MODE=1``), in the form that vLLM 0.28, 0.29 and
0.32 give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from vime_grpo import RunConfig

from vime_integration.errors import PipelineError

#: Seconds for the answer; the server looks round its host for it, once.
ASK_S = 60.0


@dataclass(frozen=True)
class Foreign:
    """What was found out about one engine.

    Attributes:
        url: Its address.
        seen: What it serves with, or why that cannot be asked, as text.
        asked: Whether it answered with its configuration.
        problems: Why the run cannot use it as it is; each says what is seen, what is expected and what to do.
    """

    url: str
    seen: str
    asked: bool
    problems: tuple[str, ...] = ()


def look_at_foreign(config: RunConfig) -> Iterator[Foreign]:
    """Ask every engine of ``engine.urls``.

    Raises:
        PipelineError: One does not answer at all.
    """
    for url in config.engine.urls:
        try:
            answer = httpx.get(f"{url}/server_info", params={"config_format": "json"}, timeout=ASK_S, trust_env=False)
        except httpx.HTTPError as error:
            raise PipelineError(
                "an engine that somebody else started does not answer",
                where=url,
                seen=f"{type(error).__name__}: {error}",
                expected="a vLLM server",
                fix="start it, or remove it from engine.urls",
            ) from error
        yield _judge(config, url, answer)


def check_foreign(config: RunConfig) -> list[str]:
    """Check every engine of ``engine.urls``.

    Returns:
        A line for each that cannot be asked, to be shown once.

    Raises:
        PipelineError: One does not answer, or serves in a way that the run cannot use.
    """
    found = list(look_at_foreign(config))
    for engine in found:
        if engine.problems:
            raise PipelineError(
                "an engine that somebody else started does not fit the run",
                where=engine.url,
                seen="; ".join(engine.problems),
                fix="start it with these arguments, or let the run start its engines (engine.count)",
            )
    return [f"{engine.url} is taken as it is: {engine.seen}" for engine in found if not engine.asked]


def misfits(config: RunConfig, model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what of an engine's configuration the run cannot use.

    Args:
        config: The run.
        model: The part ``model_config`` of what vLLM says of itself.
    """
    problems = []
    dtype = str(model["dtype"]).removeprefix("torch.")
    head = str((model.get("hf_overrides") or {}).get("head_dtype", "model")).lower()
    types = [dtype if each == "model" else each for each in (head, config.model.head_dtype)]
    if types[0] != types[1]:
        problems.append(
            f"its logits are {types[0]} and the trainer's {types[1]} (model.head_dtype): it needs "
            f"--hf-overrides.head_dtype {config.model.head_dtype}"
        )
    if int(model["max_model_len"]) < config.rollout.max_context_tokens:
        problems.append(
            f"its longest context is {model['max_model_len']} tokens and rollout.max_context_tokens is "
            f"{config.rollout.max_context_tokens}: it needs --max-model-len {config.rollout.max_context_tokens}"
        )
    changed = config.rollout.temperature != 1 or config.rollout.top_p != 1 or config.rollout.top_k != -1
    if changed and model["logprobs_mode"] != "processed_logprobs":
        problems.append(
            f"its logprobs are {model['logprobs_mode']}, not of the distribution that is sampled from at the run's "
            "temperature, top_p and top_k: it needs --logprobs-mode processed_logprobs"
        )
    return tuple(problems)


def _judge(config: RunConfig, url: str, answer: httpx.Response) -> Foreign:
    if answer.status_code != httpx.codes.OK:
        return Foreign(
            url, f"/server_info answers {answer.status_code}, so its settings cannot be checked", asked=False
        )
    try:
        model = answer.json()["vllm_config"]["model_config"]
        problems = misfits(config, model)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"its /server_info cannot be read ({type(error).__name__}: {error})"
        return Foreign(url, why, asked=False)
    return Foreign(url, f"{model['model']} in {str(model['dtype']).removeprefix('torch.')}", True, problems)
