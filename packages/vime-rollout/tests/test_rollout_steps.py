"""The rollout loop over an engine in memory: seeds, order, versions, continuation, failure, deadlines; and the pool.

The engine here is a function of (tokens, seed), so that cause and effect can be seen; the same loop runs over the real
engine in ``test_rollout_real_engine.py``.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest
from vime_rollout import (
    Encoder,
    EnginePool,
    EngineState,
    Generation,
    Prompt,
    Rollout,
    RolloutConfig,
    SampleStatus,
    SamplingParams,
    VersionSpan,
    load_reward,
    rollout_metrics,
    zero_reasons,
)
from vime_rollout.errors import (
    EngineDeadError,
    EngineRequestError,
    EngineStateError,
    EngineTimeoutError,
    RolloutError,
    SampleError,
)


class MemoryEngine:
    """Answers with tokens drawn from the request's seed; can be slow, cut a response short, or fail."""

    def __init__(self, name="memory", *, delay=0.0, version=0, cut_after=None, error=None, fail_at=None):
        self.name, self.state, self.in_flight = name, EngineState.READY, 0
        self.delay, self.version, self.cut_after, self.error, self.fail_at = delay, version, cut_after, error, fail_at
        self.requests, self.peak, self.cancelled = [], 0, 0

    async def generate(self, request, **options):
        (generation,) = await self.generate_many(request, 1, **options)
        return generation

    async def generate_many(self, request, count, *, version=None, deadline_s=None):
        self.requests.append(request)
        self.in_flight += count
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.delay * random.random() if self.delay < 1 else self.delay)
            if self.error is not None and len(self.requests) >= (self.fail_at or 0):
                raise self.error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= count
        return tuple(self.answer(request.alone(index)) for index in range(count))

    def answer(self, request):
        draw = random.Random(request.seed)
        wanted = min(request.sampling.max_tokens, self.cut_after or request.sampling.max_tokens)
        tokens = tuple(draw.randrange(4, 14) for _ in range(wanted))
        cut = self.cut_after is not None and wanted < request.sampling.max_tokens
        self.version += bool(cut)
        spans = (VersionSpan(self.version, 0, wanted),) if wanted else ()
        status = SampleStatus.ABORTED if cut else SampleStatus.TRUNCATED
        return Generation(tokens, (-1.0,) * wanted, spans, status, engine=self.name)


@pytest.fixture(scope="module")
def encoder(tokenizer_folder):
    return Encoder(tokenizer_folder)


def prompts(n):
    return [Prompt(id=f"p:{i}", text=f"{i}+1=", label="1", position=i) for i in range(n)]


def make_rollout(engine, encoder, **options):
    config = {"samples_per_prompt": 3, "sampling": SamplingParams(max_tokens=6), "max_context_tokens": 64, **options}
    return Rollout(engine, encoder, load_reward("exact_match"), RolloutConfig(**config))


async def test_groups_come_in_order_and_depend_on_nothing_but_seeds(encoder):
    quick = await make_rollout(MemoryEngine(), encoder).run(prompts(5), version=0)
    slow_engine = MemoryEngine(delay=0.05)
    slow = await make_rollout(slow_engine, encoder, concurrency=4).run(prompts(5))
    assert slow_engine.peak == 3  # a second prompt's three samples do not fit into four
    assert [g.prompt.position for g in quick] == list(range(5))
    assert [[s.tokens for s in g] for g in quick] == [[s.tokens for s in g] for g in slow]
    assert len({s.seed for g in quick for s in g}) == 15
    other = await make_rollout(MemoryEngine(), encoder, seed=1).run(prompts(5))
    assert [s.tokens for s in other[0]] != [s.tokens for s in quick[0]]
    sample = quick[2].samples[1]
    assert encoder.decode(sample.tokens[: sample.prompt_length]) == "2+1="
    assert encoder.decode(sample.tokens[sample.prompt_length :]) == sample.response
    assert sample.reward == 0.0
    assert "differs from label '1'" in sample.reward_reason
    assert sample.timings.engine == "memory"


async def test_a_cut_sample_is_continued_from_its_own_tokens(encoder):
    engine = MemoryEngine(cut_after=2)
    (group,) = await make_rollout(engine, encoder, samples_per_prompt=1).run(prompts(1))
    (sample,) = group
    assert sample.response_length == 6
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.versions == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 6))
    for request in engine.requests:
        assert request.tokens == sample.tokens[: len(request.tokens)]
    assert [r.sampling.max_tokens for r in engine.requests] == [6, 4, 2]


async def test_a_sample_that_is_always_cut_is_an_error(encoder):
    engine = MemoryEngine(cut_after=1)
    config = {"sampling": SamplingParams(max_tokens=500), "max_context_tokens": 600, "samples_per_prompt": 1}
    with pytest.raises(RolloutError, match="again and again"):
        await make_rollout(engine, encoder, **config).run(prompts(1))
    assert len(engine.requests) == 64


async def test_the_context_bounds_the_response(encoder):
    engine = MemoryEngine()
    (group,) = await make_rollout(engine, encoder, max_context_tokens=7).run(prompts(1))
    assert {len(s.tokens) for s in group} == {7}
    with pytest.raises(RolloutError, match="no room") as caught:
        await make_rollout(engine, encoder, max_context_tokens=4).run(prompts(1))
    assert caught.value.where == "prompt p:0"


@pytest.mark.parametrize(
    ("together", "failing", "note"),
    [(1, "p:1@0-2", "sample 2"), (2, "p:1@0-0to1", "samples 0 to 1"), (None, "p:1@0-0to2", "samples 0 to 2")],
)
async def test_the_first_error_ends_the_step_with_its_cause(encoder, together, failing, note):
    engine = MemoryEngine(delay=30, error=None)
    bad = EngineRequestError("engine refused the request")
    original = engine.generate_many

    async def generate_many(request, count, **options):
        if request.request_id.startswith(failing):
            raise bad
        return await original(request, count, **options)

    engine.generate_many = generate_many
    with pytest.raises(EngineRequestError) as caught:
        await asyncio.wait_for(make_rollout(engine, encoder, samples_per_request=together).run(prompts(4)), 5)
    assert caught.value is bad
    assert caught.value.__notes__ == [f"{note} of group p:1@0"]
    assert engine.in_flight == 0
    assert engine.cancelled == len(engine.requests)


async def test_the_step_has_a_deadline(encoder):
    engine = MemoryEngine(delay=30)
    with pytest.raises(EngineTimeoutError, match="0 of 2 groups"):
        await make_rollout(engine, encoder, step_deadline_s=0.1).run(prompts(2))
    assert engine.in_flight == 0
    assert engine.cancelled == 2


async def test_leaving_a_stream_cancels_the_rest(encoder):
    engine = MemoryEngine(delay=0.2)
    async with aclosing(make_rollout(engine, encoder, concurrency=3).stream(prompts(6))) as stream:
        async for group in stream:
            assert group.is_scored
            break
    assert engine.in_flight == 0
    assert len(engine.requests) < 6


async def test_a_prompt_twice_is_refused(encoder):
    with pytest.raises(RolloutError, match="twice"):
        await make_rollout(MemoryEngine(), encoder).run([*prompts(1), *prompts(1)])


async def test_a_generate_function_of_ones_own(encoder, make_sample):
    seen = []

    async def generate(rollout, prompt, index, version):
        seen.append((prompt.id, index, version, rollout.seed_of(prompt, index)))
        return make_sample(prompt_id=prompt.id, group_id=prompt.group_id, index=index, response="1", label=prompt.label)

    config = RolloutConfig(samples_per_prompt=2, sampling=SamplingParams(max_tokens=4), max_context_tokens=32)
    rollout = Rollout(MemoryEngine(), encoder, load_reward("exact_match"), config, generate=generate)
    (group,) = await rollout.run(prompts(1), version=5)
    assert group.rewards == (1.0, 1.0)
    assert [s[:3] for s in seen] == [("p:0", 0, 5), ("p:0", 1, 5)]


async def test_pool_spreads_by_load_and_sticks_by_session(encoder):
    engines = [MemoryEngine(f"e{i}", delay=0.02) for i in range(3)]
    await make_rollout(EnginePool(engines), encoder).run(prompts(6))
    assert [len(e.requests) for e in engines] == [2, 2, 2]
    sticky = [MemoryEngine(f"e{i}") for i in range(3)]
    await make_rollout(EnginePool(sticky), encoder, sticky_groups=True).run(prompts(12))
    where = {r.session_id: e.name for e in sticky for r in e.requests}
    assert sum(len({r.session_id for r in e.requests}) for e in sticky) == len(where) == 12
    assert len(set(where.values())) > 1


async def test_pool_raises_or_reroutes_when_an_engine_is_lost(encoder):
    def engines():
        dead = EngineDeadError("engine died", where="engine e0")
        return [MemoryEngine("e0", error=dead, fail_at=2), MemoryEngine("e1")]

    with pytest.raises(EngineDeadError):
        await make_rollout(EnginePool(engines()), encoder).run(prompts(4))
    pool = EnginePool(engines(), on_loss="reroute")
    groups = await make_rollout(pool, encoder).run(prompts(4))
    calm = await make_rollout(MemoryEngine(), encoder).run(prompts(4))
    assert [[s.tokens for s in g] for g in groups] == [[s.tokens for s in g] for g in calm]
    assert list(pool.lost) == ["e0"]
    pool.readmit("e0")
    assert pool.lost == {}
    with pytest.raises(EngineStateError, match="not lost"):
        pool.readmit("e0")


async def test_pool_without_engines_says_why(encoder):
    dead = EngineDeadError("engine died")
    pool = EnginePool([MemoryEngine("e0", error=dead), MemoryEngine("e1", error=dead)], on_loss="reroute")
    with pytest.raises(EngineStateError, match="no engine can serve") as caught:
        await make_rollout(pool, encoder).run(prompts(1))
    assert caught.value.__cause__ is dead
    for bad in ([], [MemoryEngine("a"), MemoryEngine("a")]):
        with pytest.raises(EngineStateError, match="distinct"):
            EnginePool(bad)


def test_metrics(make_group):
    groups = [make_group(0, 3, (1.0, 1.0)), make_group(1, 4, (0.0, 0.0)), make_group(2, 4, (1.0, 0.0))]
    metrics = rollout_metrics(groups, seconds=2.0, devices=3)
    expected = {
        "rollout/raw_reward": 0.5,
        "rollout/response_len/mean": 3.0,
        "rollout/truncated_ratio": 0.0,
        "rollout/zero_std/ratio": 2 / 3,
        "rollout/zero_std/count_1": 1.0,
        "rollout/zero_std/count_0": 1.0,
        "rollout/repetition_frac": 0.0,
        "rollout/version/min": 3.0,
        "rollout/version/max": 4.0,
        "perf/tokens_per_gpu_per_sec": 18 / 2.0 / 3,
        "perf/effective_tokens_per_gpu_per_sec": 18 / 2.0 / 3,
        "perf/rollout_time": 2.0,
        "perf/longest_sample_tokens_per_sec": 1.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert zero_reasons(groups) == [("none", 3)]
    with pytest.raises(SampleError, match="no groups"):
        rollout_metrics([], seconds=1.0)


def test_repetition_and_timeouts_are_seen(make_sample, make_group):
    prompt = make_group(0).prompt
    fields = {"group_id": prompt.group_id, "prompt_id": prompt.id}
    looping = make_sample(index=0, response="abc" * 2000, **fields).scored(0.0, "timed out after 3 s")
    plain = make_sample(index=1, response="a short answer", **fields).scored(1.0)
    metrics = rollout_metrics([type(make_group(0))(prompt, (looping, plain))], seconds=1.0)
    assert metrics["rollout/repetition_frac"] == 0.5
    assert metrics["rollout/reward_timeout_ratio"] == 0.5
