"""Partial samples: what a step cuts, the next one goes on from, with the versions and logprobs that its tokens had.

The engine here makes one token at a time and knows how far each request has come, so that a cut hits at a known place;
``test_rollout_real_engine.py`` cuts a real one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_rollout import (
    Encoder,
    EngineState,
    Generation,
    Prompt,
    Rollout,
    RolloutConfig,
    SampleStatus,
    SamplingParams,
    VersionSpan,
)
from vime_rollout.errors import RolloutError, StateError
from vime_rollout.experimental import Collector, PartialSamples
from vime_rollout.rewards import Score
from vime_rollout.single_turn import go_on


class SteppingEngine:
    """Makes the tokens of a request one by one; how many the prompts with long answers make is for the test to say."""

    name, state = "stepping", EngineState.READY

    def __init__(self):
        self.version, self.running, self.sampled, self.aborts = 0, {}, 0, 0
        self.stalls_at = {}

    @property
    def in_flight(self):
        return len(self.running)

    async def generate(self, request, *, version=None, deadline_s=None):
        draw = random.Random(request.seed)
        tokens, cut = [], asyncio.Event()
        self.running[request.request_id] = cut
        group = request.request_id.partition("@")[0]
        try:
            while len(tokens) < request.sampling.max_tokens and not cut.is_set():
                if len(request.tokens) + len(tokens) >= self.stalls_at.get(group, 10**6):
                    await cut.wait()
                    break
                tokens.append(draw.randrange(4, 14))
                self.sampled += 1
                await asyncio.sleep(0)
        finally:
            del self.running[request.request_id]
        whole = len(tokens) == request.sampling.max_tokens
        status = SampleStatus.TRUNCATED if whole else SampleStatus.ABORTED
        spans = (VersionSpan(self.version, 0, len(tokens)),) if tokens else ()
        logprobs = tuple(-t / 16 for t in tokens)
        return Generation(tuple(tokens), logprobs, spans, status, engine=self.name)

    async def generate_many(self, request, count, **options):
        raise AssertionError("a sample that may be cut has a request of its own")

    async def abort(self, request_ids):
        self.aborts += 1
        for name in list(request_ids):
            if name in self.running:
                self.running[name].set()


class Reward:
    name = "by-index"

    def __init__(self):
        self.scored = 0

    async def score(self, sample):
        self.scored += 1
        return Score(1.0 + sample.index)

    def close(self): ...


class Source:
    def __init__(self):
        self.position = 0

    def next(self, n):
        first, self.position = self.position, self.position + n
        return [Prompt(id=f"p:{i}", text="12+34=", position=i) for i in range(first, first + n)]


LENGTH = 8


@pytest.fixture(scope="module")
def encoder(tokenizer_folder):
    return Encoder(tokenizer_folder)


def make(encoder, *, max_lag=None, ahead=2, source=None, concurrency=64):
    config = RolloutConfig(
        samples_per_prompt=2,
        sampling=SamplingParams(max_tokens=LENGTH),
        max_context_tokens=64,
        concurrency=concurrency,
    )
    engine, reward = SteppingEngine(), Reward()
    rollout = Rollout(engine, encoder, reward, config, partial=PartialSamples(max_lag=max_lag))
    return Collector(rollout, (source or Source()).next, ahead=ahead), rollout


def prompt_length(encoder):
    return len(encoder.encode(Source().next(1)[0]).tokens)


async def test_a_cut_sample_is_gone_on_with_in_the_next_step(encoder):
    collector, rollout = make(encoder)
    engine, partial = rollout.engine, rollout.partial
    engine.stalls_at = {"p:2": prompt_length(encoder) + 3, "p:3": prompt_length(encoder)}
    done = await collector.step(2, version=0)
    assert [g.prompt.position for g in done.groups] == [0, 1]
    assert [p.position for p in collector.waiting] == [2, 3]
    assert engine.running == {}
    assert len(partial) == 2  # the two samples of prompt 2; those of prompt 3 had no token yet
    assert engine.sampled == 4 * LENGTH + 2 * 3
    engine.version, engine.stalls_at = 1, {}
    done = await collector.step(2, version=1)
    assert [g.prompt.position for g in done.groups] == [2, 3]
    for sample in done.groups[0]:
        assert sample.versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, LENGTH))
        assert sample.logprobs == tuple(-t / 16 for t in sample.tokens[sample.prompt_length :])
        assert sample.status is SampleStatus.TRUNCATED
    assert {s.versions for s in done.groups[1]} == {(VersionSpan(1, 0, LENGTH),)}
    assert (partial.counts.continued, partial.counts.tokens_kept) == (2, 6)
    assert len(partial) == 0 or {p.position for p in collector.waiting} == {4, 5}


async def test_nothing_that_was_finished_is_made_or_scored_again(encoder):
    collector, rollout = make(encoder, ahead=3)
    engine, reward = rollout.engine, rollout.reward
    engine.stalls_at = {"p:1": prompt_length(encoder) + 7}  # prompts 2, 3 and 4 are done before it
    first = asyncio.create_task(collector.step(2, version=0))
    while reward.scored < 8:
        await asyncio.sleep(0)
    engine.stalls_at = {}
    for cut in engine.running.values():
        cut.set()  # cut from outside: it goes on by itself
    await first
    assert [g.prompt.position for g in first.result().groups] == [0, 1]
    sampled, scored = engine.sampled, reward.scored
    assert (sampled, scored) == (10 * LENGTH, 10)
    collector._ahead = 0
    done = await collector.step(3, version=0)
    assert [g.prompt.position for g in done.groups] == [2, 3, 4]
    assert (engine.sampled, reward.scored) == (sampled, scored)
    assert rollout.partial.counts.reused == 6
    assert len(rollout.partial) == 0


async def test_what_is_too_old_is_made_again_and_counted(encoder):
    collector, rollout = make(encoder, max_lag=1, ahead=1)
    engine = rollout.engine
    engine.stalls_at = {"p:1": prompt_length(encoder) + 3}
    await collector.step(1, version=0)
    engine.version, engine.stalls_at = 2, {}
    done = await collector.step(1, version=2)
    assert {s.versions for s in done.groups[0]} == {(VersionSpan(2, 0, LENGTH),)}
    assert (rollout.partial.counts.too_old, rollout.partial.counts.continued) == (2, 0)


async def test_a_sample_that_is_cut_after_its_last_token_is_whole(encoder):
    _, rollout = make(encoder)
    prompt = encoder.encode(Source().next(1)[0])
    spans = (VersionSpan(0, 0, LENGTH),)
    part = Generation((5,) * LENGTH, (-0.5,) * LENGTH, spans, SampleStatus.ABORTED, engine="stepping")
    sample = await go_on(rollout, prompt, 0, None, [part])
    assert (sample.response_length, sample.status, rollout.engine.sampled) == (LENGTH, SampleStatus.TRUNCATED, 0)


async def test_state_goes_through_json(encoder):
    collector, rollout = make(encoder)
    rollout.engine.stalls_at = {"p:2": prompt_length(encoder) + 3}
    await collector.step(2, version=0)
    state = json.loads(json.dumps(collector.state_dict()))
    source = Source()
    source.position = 4
    other, resumed = make(encoder, source=source)
    other.load_state_dict(state)
    assert other.state_dict() == state
    results = []
    for c, r in ((collector, rollout), (other, resumed)):
        r.engine.version, r.engine.stalls_at = 1, {}
        results.append([[s.to_dict() | {"timings": None} for s in g] for g in (await c.step(2, version=1)).groups])
    assert results[0] == results[1]
    for broken in ({"format": 9}, {**state, "partial": {"format": 9}}):
        with pytest.raises(StateError, match="format"):
            other.load_state_dict(broken)


async def test_partial_samples_need_the_built_in_generate(encoder):
    async def generate(rollout, prompt, index, version): ...

    config = RolloutConfig(samples_per_prompt=2, sampling=SamplingParams(max_tokens=4), max_context_tokens=64)
    with pytest.raises(RolloutError, match="built-in generate"):
        Rollout(SteppingEngine(), encoder, Reward(), config, generate=generate, partial=PartialSamples())


async def test_an_engine_that_does_not_answer_a_cut_costs_the_tokens_only(encoder, monkeypatch, caplog):
    collector, rollout = make(encoder, ahead=1)
    rollout.engine.stalls_at = {"p:1": prompt_length(encoder) + 3}

    async def deaf(request_ids): ...

    monkeypatch.setattr(rollout.engine, "abort", deaf)
    monkeypatch.setattr(sys.modules["vime_rollout.experimental.collect"], "_CUT_DEADLINE_S", 0.2)
    done = await collector.step(1, version=0)
    assert len(done.groups) == 1
    assert rollout.engine.running == {}
    assert "generated again" in caplog.text
    rollout.engine.stalls_at = {}
    (group,) = (await collector.step(1, version=0)).groups
    assert {s.response_length for s in group} == {LENGTH}


def by_token(parts):
    """Return (token, version) of each response token."""
    return tuple(
        (token, span.version) for tokens, spans in parts for span in spans for token in tokens[span.start : span.end]
    )


async def test_a_group_that_comes_in_after_the_batch_is_decided_is_kept(encoder, monkeypatch):
    collector, rollout = make(encoder, ahead=1)
    rollout.engine.stalls_at = {"p:1": prompt_length(encoder) + 3}
    abort = rollout.engine.abort

    async def late(request_ids):
        rollout.engine.stalls_at = {}
        for name in list(request_ids):  # they go on and end by themselves before the abort arrives
            rollout.engine.running[name].set()
        partial.cutting = False
        await whole.wait()
        whole.clear()
        partial.cutting = True
        await abort(request_ids)

    def forget(prompt):
        original(prompt)
        if prompt.position == len(done):  # the one that is not needed yet
            whole.set()

    partial, whole, done = rollout.partial, asyncio.Event(), ["p:0"]
    original = partial.forget
    monkeypatch.setattr(partial, "forget", forget)
    monkeypatch.setattr(rollout.engine, "abort", late)
    await collector.step(1, version=0)
    sampled = rollout.engine.sampled
    assert sampled == 4 * LENGTH
    done.append("p:1")
    (group,) = (await collector.step(1, version=0)).groups
    assert group.prompt.position == 1
    assert rollout.engine.sampled - sampled == 2 * LENGTH  # of prompt 2 alone, which was begun ahead
    assert partial.counts.reused == 2


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_wherever_it_is_cut_the_prefix_stays_and_every_token_keeps_its_version(encoder, data):
    async def run():
        collector, rollout = make(encoder, ahead=3, concurrency=data.draw(st.integers(1, 64), label="concurrency"))
        engine, start, kept = rollout.engine, prompt_length(encoder), {}
        for version in range(3):
            engine.version = version
            engine.stalls_at = {
                f"p:{i}": start + data.draw(st.integers(0, LENGTH), label=f"stall of {i} at {version}")
                for i in range(2 * version + 2, 12)
            }
            done = await collector.step(2, version=version)
            assert [g.prompt.position for g in done.groups] == [2 * version, 2 * version + 1]
            for sample in (s for g in done.groups for s in g):
                response = by_token([(sample.tokens[sample.prompt_length :], sample.versions)])
                assert len(response) == sample.response_length == LENGTH
                prefix = kept.pop((sample.group_id, sample.index), ())
                assert response[: len(prefix)] == prefix
                assert all(v == version for _, v in response[len(prefix) :])
            partial, now = rollout.partial, {}
            for key, parts in partial._parts.items():
                now[key] = by_token([(part.tokens, part.versions) for part in parts])
            for key, (sample,) in partial._finished.items():
                now[key] = by_token([(sample.tokens[sample.prompt_length :], sample.versions)])
            assert all(now[key][: len(prefix)] == prefix for key, prefix in kept.items())
            kept = now

    asyncio.run(run())
