"""Contract tests for code of your own: call one in your test suite with your function, or its dotted path.

Each check calls the function as a run would and looks at what only calling can tell. A broken promise is an
``ExtensionError`` that says which; what the function returned comes back, for assertions of your own.

``check_generate`` needs no server: a ``ScriptedEngine`` in memory answers, and remembers what it was asked, so every
trained token can be traced back to the generation that sampled it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vime_rollout import dotted, extend
from vime_rollout.data.source import DataSource
from vime_rollout.engine.request import GenerateRequest, Generation, SamplingParams
from vime_rollout.engine.state import EngineState
from vime_rollout.errors import ExtensionError
from vime_rollout.filters import GroupFilter, reason_to_drop
from vime_rollout.rewards import Score, load_reward
from vime_rollout.rewards.base import FunctionReward, Reward, RewardFunction
from vime_rollout.rollout import GenerateFunction, Rollout, RolloutConfig
from vime_rollout.sample import Prompt, Sample, SampleGroup, SampleStatus, Timings, VersionSpan
from vime_rollout.tokens import Encoder

_VERSION = 7
Script = Callable[[GenerateRequest], Sequence[int]]


class ScriptedEngine:
    """An engine in memory, a function of the request, that remembers what it was asked and what it answered.

    Args:
        vocabulary: Token ids to draw from, by the request's seed.
        script: Gives the tokens of an answer instead; cut at the request's ``max_tokens``.
        version: Version of every token.
    """

    def __init__(self, vocabulary: Sequence[int], *, script: Script | None = None, version: int = 0) -> None:
        """Begin without history."""
        self.name = "scripted"
        self.in_flight = 0
        self.version = version
        self.history: list[tuple[GenerateRequest, Generation, int | None]] = []
        self._vocabulary = list(vocabulary)
        self._script = script

    @property
    def state(self) -> EngineState:
        """Ready, always."""
        return EngineState.READY

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Answer a request; equal requests get equal answers."""
        del deadline_s
        await asyncio.sleep(0)
        draw = random.Random(request.seed)  # noqa: S311 - repeatable, not secret
        most = request.sampling.max_tokens
        wanted = [draw.choice(self._vocabulary) for _ in range(most)] if self._script is None else self._script(request)
        tokens = tuple(wanted[:most])
        logprobs = tuple(-draw.random() for _ in tokens)
        status = SampleStatus.TRUNCATED if len(tokens) == most else SampleStatus.COMPLETED
        spans = (VersionSpan(self.version, 0, len(tokens)),) if tokens else ()
        generation = Generation(tokens, logprobs, spans, status, engine=self.name)
        self.history.append((request, generation, version))
        return generation

    async def generate_many(
        self, request: GenerateRequest, count: int, *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Answer several times, each as if it were asked for alone."""
        alone = [request.alone(index) for index in range(count)]
        return tuple([await self.generate(one, version=version, deadline_s=deadline_s) for one in alone])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Do nothing: every answer is whole at once."""


async def check_generate(
    generate: str | GenerateFunction,
    encoder: Encoder,
    prompts: Sequence[Prompt],
    *,
    config: RolloutConfig | None = None,
    script: Script | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[list[Sample]]:
    """Check a generate function.

    It must return samples of the prompt and index that it was given, unscored, within the context; train on nothing but
    tokens that the engine sampled, where it sampled them, with its logprobs; pass on the version; seed every request,
    differently for every index; and do the same again when called again.

    Args:
        generate: The function or its dotted path.
        encoder: Tokenizer and template of a model.
        prompts: At least one.
        config: Of the rollout it is called with; by default 2 samples, 32 tokens each, 512 tokens of context.
        script: What the engine answers; by default random tokens out of the prompts' own.
        options: Options of a dotted path.

    Returns:
        The records of every (prompt, index), in order.

    Raises:
        ExtensionError: Naming the promise that was broken.
    """
    function = extend.load_generate(generate, options) if isinstance(generate, str) else generate
    name = generate if isinstance(generate, str) else dotted.describe(generate)
    config = config or RolloutConfig(
        samples_per_prompt=2, sampling=SamplingParams(max_tokens=32), max_context_tokens=512
    )
    encoded = [encoder.encode(prompt) for prompt in prompts]
    vocabulary = sorted({token for prompt in encoded for token in prompt.tokens})
    results: list[list[Sample]] = []
    seeds: dict[int, tuple[str, int]] = {}
    for prompt in encoded:
        for index in range(config.samples_per_prompt):
            where = f"generate function {name}, sample {index} of group {prompt.group_id}"
            runs = []
            for _ in range(2):
                engine = ScriptedEngine(vocabulary, script=script, version=_VERSION)
                rollout = Rollout(engine, encoder, _unscored, config, generate=function)
                made = await function(rollout, prompt, index, _VERSION)
                records = [made] if isinstance(made, Sample) else list(made)
                _check_requests(engine, config, where, seeds, (prompt.group_id, index))
                _check_records(records, prompt, index, engine, config, where)
                runs.append([dataclasses.replace(record, timings=Timings()) for record in records])
            _demand(runs[0] == runs[1], where, "differs when called again", "", "equal samples from equal seeds")
            results.append(records)
    return results


def _check_requests(
    engine: ScriptedEngine,
    config: RolloutConfig,
    where: str,
    seeds: dict[int, tuple[str, int]],
    owner: tuple[str, int],
) -> None:
    _demand(bool(engine.history), where, "asked the engine nothing", "", "at least one request")
    for request, _, version in engine.history:
        _demand(
            version == _VERSION, where, "does not pass on the version", str(version), "generate(..., version=version)"
        )
        _demand(request.seed is not None, where, "sends a request without a seed", "", "rollout.seed_of(...)")
        longest = len(request.tokens) + request.sampling.max_tokens
        fits = longest <= config.max_context_tokens
        _demand(fits, where, "asks beyond the context", f"{longest} tokens", f"at most {config.max_context_tokens}")
        other = seeds.setdefault(request.seed or 0, owner)
        _demand(other == owner, where, "shares a seed", f"with sample {other}", "rollout.seed_of(prompt, index, turn)")
    mine = [request.seed for request, _, _ in engine.history]
    _demand(len(set(mine)) == len(mine), where, "uses a seed twice", str(mine), "another turn, another seed")


def _check_records(
    records: Sequence[Sample],
    prompt: Prompt,
    index: int,
    engine: ScriptedEngine,
    config: RolloutConfig,
    where: str,
) -> None:
    _demand(bool(records), where, "returned no sample", "", "at least one")
    for record in records:
        _demand(isinstance(record, Sample), where, "returned no sample", repr(record)[:80], "a Sample")
        seen, expected = (record.prompt_id, record.group_id, record.index), (prompt.id, prompt.group_id, index)
        _demand(seen == expected, where, "returned another sample", str(seen), str(expected))
        _demand(record.reward is None, where, "scored its sample", str(record.reward), "none: the reward does that")
        _demand(record.label == prompt.label, where, "lost the label", str(record.label), str(prompt.label))
        length, most = len(record.tokens), config.max_context_tokens
        _demand(length <= most, where, "exceeds the context", f"{length} tokens", f"at most {most}")
        _check_trained(record, engine, where)
    trained = sum(record.trained_tokens for record in records)
    sampled = sum(len(generation.tokens) for _, generation, _ in engine.history)
    _demand(trained <= sampled, where, "trains on a token twice", f"{trained} tokens", f"at most {sampled}, as sampled")
    start = records[0].tokens[: len(prompt.tokens)]
    _demand(start == prompt.tokens, where, "changed the prompt's tokens", str(start), str(prompt.tokens))


def _check_trained(record: Sample, engine: ScriptedEngine, where: str) -> None:
    """Trace every trained token to a generation that sampled it after exactly the tokens before it."""
    sampled: dict[int, tuple[int, float]] = {}
    for request, generation, _ in engine.history:
        begin = len(request.tokens)
        if record.tokens[:begin] == request.tokens:
            pairs = zip(generation.tokens, generation.logprobs, strict=True)
            sampled |= {begin + offset: pair for offset, pair in enumerate(pairs)}
    for offset, flag in enumerate(record.loss_mask):
        if not flag:
            continue
        position = record.prompt_length + offset
        seen, expected = (record.tokens[position], record.logprobs[offset]), sampled.get(position)
        what = f"trains on a token (response token {offset}) that the engine did not sample there"
        _demand(seen == expected, where, what, f"id and logprob {seen}", f"{expected}, or loss_mask 0")


def check_filter(
    keep: str | GroupFilter, groups: Sequence[SampleGroup], *, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Check a filter: a string for every group, and the same one again.

    Args:
        keep: The filter, its name or its dotted path.
        groups: Scored groups, at least one.
        options: Options of a dotted path.

    Returns:
        Its answers.

    Raises:
        ExtensionError: Naming the promise that was broken.
    """
    function = extend.load_filter(keep, options) if isinstance(keep, str) else keep
    answers = [reason_to_drop(function, group) for group in groups]
    again = [reason_to_drop(function, group) for group in reversed(groups)][::-1]
    name = keep if isinstance(keep, str) else dotted.describe(keep)
    _demand(answers == again, f"filter {name}", "differs when asked again", str(again), str(answers))
    return answers


def check_source(
    make: str | Callable[[], DataSource],
    *,
    options: Mapping[str, Any] | None = None,
    encoder: Encoder | None = None,
    count: int = 8,
) -> list[Prompt]:
    """Check a data source: a repeatable walk with a position that can be saved and gone on from.

    Args:
        make: Makes a fresh source; or its dotted path.
        options: Options of a dotted path.
        encoder: For a dotted path that takes one.
        count: Prompts to draw; more than one epoch of a small source shows more.

    Returns:
        The first ``count`` prompts.

    Raises:
        ExtensionError: Naming the promise that was broken.
    """

    def fresh() -> DataSource:
        return extend.load_source(make, options, encoder=encoder) if isinstance(make, str) else make()

    where = f"data source {make if isinstance(make, str) else dotted.describe(make)}"
    prompts = fresh().next(count)
    well = len(prompts) == count and all(isinstance(prompt, Prompt) for prompt in prompts)
    _demand(well, where, "next(n) does not return n prompts", repr(prompts)[:200], f"{count} of Prompt")
    groups = [prompt.group_id for prompt in prompts]
    _demand(len(set(groups)) == count, where, "hands out a group twice", str(groups), "another epoch each time round")
    positions = [prompt.position for prompt in prompts]
    _demand(positions == list(range(count)), where, "counts positions wrongly", str(positions), f"0..{count - 1}")
    for cut in range(count + 1):
        first, second = fresh(), fresh()
        head = first.next(cut)
        state = first.state_dict()
        try:
            saved = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            _demand(False, where, "has a state that is no JSON", str(error), "strings, numbers, lists, mappings")
        second.load_state_dict(saved)
        seen = [*head, *second.next(count - cut)]
        _demand(seen == prompts, where, f"goes on wrongly when it is resumed after {cut}", str(seen), str(prompts))
    return prompts


async def check_reward(
    reward: str | RewardFunction, samples: Sequence[Sample], *, options: Mapping[str, Any] | None = None
) -> list[Score]:
    """Check a reward: a finite score for every sample, all asked at one time, within the time-out.

    Args:
        reward: The function, its name or its dotted path.
        samples: Unscored.
        options: Options of a name or a dotted path.

    Returns:
        The scores.

    Raises:
        RewardError: As in a run.
    """
    ready: Reward
    if isinstance(reward, str):
        ready = load_reward(reward, options=options)
    else:
        ready = FunctionReward(dotted.describe(reward), reward, timeout_s=30.0)
    try:
        return list(await asyncio.gather(*map(ready.score, samples)))
    finally:
        ready.close()


class _NoReward:
    """Stands where a reward is; a generate function has no business with it."""

    name = "none"

    async def score(self, sample: Sample) -> Score:
        raise ExtensionError("generate function asked for a score", where=f"group {sample.group_id}")

    def close(self) -> None: ...


_unscored = _NoReward()


def _demand(holds: bool, where: str, what: str, seen: str, expected: str) -> None:
    if not holds:
        raise ExtensionError(f"contract broken: {what}", where=where, seen=seen[:400], expected=expected[:400])
