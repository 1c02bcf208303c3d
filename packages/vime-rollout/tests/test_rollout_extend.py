"""Code of your own: found by dotted path, refused at once when it does not fit, and told what it breaks."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from vime_rollout import (
    DataConfig,
    Encoder,
    EpochSource,
    Prompt,
    Rollout,
    RolloutConfig,
    SamplingParams,
    evaluate,
    evaluation_prompts,
    load_filter,
    load_generate,
    load_reward,
    load_source,
    open_data_source,
    single_turn,
)
from vime_rollout.errors import ExtensionError, RewardError
from vime_rollout.testing import ScriptedEngine, check_filter, check_generate, check_source

THIS = "extensions_for_tests"


async def echo(rollout, prompt, index, version, *, note=""):
    return dataclasses.replace(await single_turn(rollout, prompt, index, version), response=note)


async def too_few(rollout, prompt):
    return None


def not_async(rollout, prompt, index, version):
    return None


class Caller:
    def __init__(self, note="", fail=False):
        if fail:
            raise KeyError("no such note")
        self.note = note

    async def __call__(self, rollout, prompt, index, version):
        return await echo(rollout, prompt, index, version, note=self.note)


ready = Caller("ready")
number = 3


def keeps_long(group, *, least=2):
    return "" if len(group) >= least else f"only {len(group)}"


def says_true(group):
    return True


async def async_filter(group):
    return ""


class NoState:
    def __init__(self, **options): ...

    def next(self, n):
        return []


class WrongNext(NoState):
    def next(self):
        return []

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class Endless:
    """A source that breaks one promise, as told."""

    def __init__(self, *, breaks="", encoder=None):
        self.breaks, self.encoder, self.position = breaks, encoder, 0

    def next(self, n):
        rows = range(self.position, self.position + n)
        self.position += n
        prompts = [Prompt(id=f"e:{i % 3}", text="1", position=i, epoch=i // 3) for i in rows]
        if self.breaks == "epoch":
            prompts = [dataclasses.replace(p, epoch=0) for p in prompts]
        if self.breaks == "position":
            prompts = [dataclasses.replace(p, position=p.position + 1) for p in prompts]
        return prompts[: n - 1] if self.breaks == "count" and n else prompts

    def state_dict(self):
        return {"position": {1} if self.breaks == "json" else 0 if self.breaks == "resume" else self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Make this module importable under a dotted path, as a user's would be."""
    monkeypatch.setitem(sys.modules, THIS, sys.modules[__name__])


@pytest.fixture(scope="module")
def encoder(tokenizer_folder):
    return Encoder(tokenizer_folder)


PROMPTS = [Prompt(id=f"p:{i}", text=f"{i}+1=", label=str(i + 1), position=i) for i in range(2)]


@pytest.mark.parametrize(
    ("name", "options", "note"),
    [("echo", {}, ""), ("echo", {"note": "a"}, "a"), ("Caller", {"note": "b"}, "b"), ("ready", {}, "ready")],
)
async def test_generate_functions_objects_and_classes(encoder, name, options, note):
    records = await check_generate(f"{THIS}:{name}", encoder, PROMPTS, options=options)
    assert len(records) == 4
    assert {sample.response for (sample,) in records} == {note}


@pytest.mark.parametrize(
    ("load", "name", "options", "what"),
    [
        (
            load_generate,
            "too_few",
            {},
            r"does not take its arg.*async def too_few\(rollout, prompt\).*index: int",
        ),
        (load_generate, "not_async", {}, r"is not async.*def not_async\(rollout, prompt, index, version\)"),
        (load_generate, "echo", {"wrong": 1}, "does not take its arguments.*wrong"),
        (load_generate, "number", {}, r"cannot be called.*3 \(int\)"),
        (load_generate, "Caller", {"fail": True}, "cannot be made.*KeyError: 'no such note'"),
        (load_generate, "Caller", {"other": 1}, "cannot be made.*class Caller.*other"),
        (load_generate, "nothing", {}, "cannot be imported.*AttributeError"),
        (load_filter, "async_filter", {}, "is async.*async def async_filter"),
        (load_filter, "keeps_long", {"most": 1}, "does not take its arguments.*most"),
        (load_source, "NoState", {}, "lacks a method.*NoState without state_dict"),
        (load_source, "WrongNext", {}, r"next does not take its arguments.*def next\(self, n\)"),
        (load_source, "number", {}, "cannot be made"),
        (load_source, "Endless", {"size": 1}, "cannot be made.*size"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(load, name, options, what):
    with pytest.raises(ExtensionError, match=re.compile(what, re.DOTALL)) as caught:
        load(f"{THIS}:{name}", options)
    assert f"{THIS}:{name}" in caught.value.where


def test_names_that_are_none(monkeypatch, tmp_path):
    for path in ("nosuchmodule:fn", "a:", ":b"):
        with pytest.raises(ExtensionError, match="cannot be imported"):
            load_generate(path)
    with pytest.raises(ExtensionError, match=r"unknown filter.*differing_rewards, all"):
        load_filter("nosuch")
    with pytest.raises(ExtensionError, match="takes no options"):
        load_filter("all", {"a": 1})
    (tmp_path / "raises_on_import.py").write_text("raise SystemError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match="SystemError: not today"):
        load_reward("raises_on_import:fn")


def test_filters(make_group):
    groups = [make_group(0), make_group(1, rewards=(1.0,))]
    assert check_filter(f"{THIS}:keeps_long", groups) == ["", "only 1"]
    assert check_filter(f"{THIS}:keeps_long", groups, options={"least": 1}) == ["", ""]
    assert check_filter("differing_rewards", groups) == ["", "all rewards are 1"]
    assert check_filter("all", groups) == ["", ""]
    with pytest.raises(ExtensionError, match=r"no reason.*True \(bool\)"):
        check_filter(f"{THIS}:says_true", groups)


def test_sources(encoder):
    assert [p.group_id for p in check_source(f"{THIS}:Endless", count=4)] == ["e:0@0", "e:1@0", "e:2@0", "e:0@1"]
    assert load_source(f"{THIS}:Endless", encoder=encoder).encoder is encoder
    config = DataConfig(gym_task="chain_sum", gym_size=3)
    check_source(lambda: open_data_source(config, encoder))


@pytest.mark.parametrize(
    ("breaks", "what"),
    [
        ("count", "does not return n prompts"),
        ("epoch", "hands out a group twice"),
        ("position", "counts positions wrongly"),
        ("json", "no JSON"),
        ("resume", "goes on wrongly when it is resumed after 1"),
    ],
)
def test_a_source_that_breaks_a_promise_is_told_which(breaks, what):
    with pytest.raises(ExtensionError, match=what):
        check_source(f"{THIS}:Endless", options={"breaks": breaks})


def changed(change):
    async def generate(rollout, prompt, index, version):
        return change(await single_turn(rollout, prompt, index, version))

    return generate


async def without_version(rollout, prompt, index, version):
    return await single_turn(rollout, prompt, index, None)


async def one_seed(rollout, prompt, index, version):
    return dataclasses.replace(await single_turn(rollout, prompt, 0, version), index=index)


async def silent(rollout, prompt, index, version):
    return []


calls = []


async def forgetful(rollout, prompt, index, version):
    calls.append(index)
    sample = await single_turn(rollout, prompt, index, version)
    return dataclasses.replace(sample, response=str(len(calls)))


@pytest.mark.parametrize(
    ("generate", "what"),
    [
        (changed(lambda s: dataclasses.replace(s, index=s.index + 1)), "returned another sample"),
        (changed(lambda s: s.scored(1.0)), "scored its sample"),
        (changed(lambda s: dataclasses.replace(s, label=None)), "lost the label"),
        (changed(lambda s: dataclasses.replace(s, tokens=(*s.tokens[:-1], 5 ^ s.tokens[-1]))), "did not sample there"),
        (changed(lambda s: dataclasses.replace(s, logprobs=(-9.0, *s.logprobs[1:]))), "did not sample there"),
        (changed(lambda s: dataclasses.replace(s, tokens=(40, *s.tokens[1:]))), "did not sample there"),
        (changed(lambda s: [s, dataclasses.replace(s, fork=1)]), "trains on a token twice"),
        (without_version, "does not pass on the version"),
        (one_seed, "shares a seed"),
        (silent, "asked the engine nothing"),
        (forgetful, "differs when called again"),
    ],
)
async def test_a_generate_function_that_breaks_a_promise_is_told_which(encoder, generate, what):
    with pytest.raises(ExtensionError, match=what):
        await check_generate(generate, encoder, PROMPTS)


async def test_forks_of_a_trajectory_share_the_score_of_the_last(encoder):
    async def forked(rollout, prompt, index, version):
        sample = await single_turn(rollout, prompt, index, version)
        first = dataclasses.replace(sample, loss_mask=(0,) * sample.response_length, response="early")
        return [first, dataclasses.replace(sample, fork=1, response=prompt.label)]

    config = RolloutConfig(samples_per_prompt=2, sampling=SamplingParams(max_tokens=4), max_context_tokens=32)
    rollout = Rollout(ScriptedEngine(range(4, 14)), encoder, load_reward("exact_match"), config, generate=forked)
    (group,) = await rollout.run(PROMPTS[:1])
    assert [(s.index, s.fork, s.reward) for s in group] == [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 1.0), (1, 1, 1.0)]
    assert type(group).from_dict(group.to_dict()) == group


async def test_evaluation_leaves_the_training_where_it_is(encoder):
    config = DataConfig(gym_task="chain_sum", gym_size=6, seed=3)
    source: EpochSource = open_data_source(config, encoder)
    training = source.next(2)
    position = source.state_dict()
    engine = ScriptedEngine(range(4, 14))
    values = RolloutConfig(samples_per_prompt=4, sampling=SamplingParams(max_tokens=8), max_context_tokens=256)
    rollout = Rollout(engine, encoder, load_reward("exact_match"), values)
    before = await rollout.run(training, version=0)
    questions = evaluation_prompts(config, encoder)
    assert [p.id for p in questions] == [f"{questions[0].id.rpartition(':')[0]}:{i}" for i in range(6)]
    assert [p.id for p in evaluation_prompts(config, encoder, most=2)] == [p.id for p in questions[:2]]
    engine.history.clear()
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    groups = await evaluate(rollout, questions, samples_per_prompt=1, sampling=greedy, version=0)
    assert [g.prompt.id for g in groups] == [p.id for p in questions]
    assert {len(g) for g in groups} == {1}
    assert {r.sampling for r, _, _ in engine.history} == {greedy}
    assert not {r.request_id for r, _, _ in engine.history} & {f"{g.prompt.group_id}-0-0" for g in before}
    assert source.state_dict() == position
    assert rollout.config == values
    strip = [[s.tokens for s in g] for g in before]
    assert [[s.tokens for s in g] for g in await rollout.run(training, version=0)] == strip


def test_evaluation_prompts_that_are_too_long_are_left_out(encoder):
    config = DataConfig(gym_task="chain_sum", gym_size=12, gym_seed=1)
    lengths = [len(p.tokens) for p in evaluation_prompts(config, encoder)]
    limit = sorted(lengths)[6]
    short = dataclasses.replace(config, max_prompt_tokens=limit, overlong="drop")
    assert [len(p.tokens) for p in evaluation_prompts(short, encoder)] == [n for n in lengths if n <= limit]


def test_the_examples_of_the_guide_run(monkeypatch, tokenizer_folder):
    guide = (Path(__file__).parent.parent / "EXTENDING.md").read_text()
    module = ModuleType("my_package")
    monkeypatch.setitem(sys.modules, "my_package", module)
    for example in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(example, "EXTENDING.md", "exec"), module.__dict__)
    module.test_my_package(str(tokenizer_folder))
