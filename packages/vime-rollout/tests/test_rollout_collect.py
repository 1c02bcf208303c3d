"""Over-sampling: the batch depends on prompts and seeds only, all drawn is accounted for, the rest is cancelled."""

from __future__ import annotations

import asyncio
import random

import pytest
from vime_rollout import Encoder, EngineState, Generation, Prompt, Rollout, RolloutConfig, SampleStatus, SamplingParams
from vime_rollout import VersionSpan as Span
from vime_rollout.errors import EngineTimeoutError, RolloutError
from vime_rollout.experimental import collect, differing_rewards
from vime_rollout.rewards import Score
from vime_rollout.together import all_of


class RandomlySlowEngine:
    """Answers after a random wait."""

    name, state, in_flight = "memory", EngineState.READY, 0

    def __init__(self, delay):
        self.delay, self.begun, self.ended = delay, 0, 0

    async def generate(self, request, *, version=None, deadline_s=None):
        self.begun += 1
        await asyncio.sleep(self.delay * random.random())
        self.ended += 1
        return Generation((5, 6), (-1.0, -1.0), (Span(0, 0, 2),), SampleStatus.COMPLETED)

    async def generate_many(self, request, count, **options):
        return tuple(await all_of(self.generate(request.alone(i), **options) for i in range(count)))


class RewardByPosition:
    """Equal rewards for every third prompt, differing ones for the others."""

    name = "by-position"

    async def score(self, sample):
        flat = int(sample.prompt_id.removeprefix("p:")) % 3 == 0
        return Score(1.0 if flat or sample.index else 0.5)

    def close(self): ...


class Source:
    def __init__(self):
        self.drawn = []

    def next(self, n):
        first = len(self.drawn)
        prompts = [Prompt(id=f"p:{i}", text="1", position=i) for i in range(first, first + n)]
        self.drawn += prompts
        return prompts


def rollout_of(tokenizer_folder, delay=0.02, **options):
    values = {"samples_per_prompt": 2, "sampling": SamplingParams(max_tokens=4), "max_context_tokens": 16}
    config = RolloutConfig(**{**values, **options})
    return Rollout(RandomlySlowEngine(delay), Encoder(tokenizer_folder), RewardByPosition(), config)


@pytest.mark.parametrize("ahead", [0, 3, 10])
async def test_the_batch_is_the_first_kept_prompts(tokenizer_folder, ahead):
    source = Source()
    rollout = rollout_of(tokenizer_folder)
    done = await collect(rollout, source.next, 4, ahead=ahead)
    assert [g.prompt.position for g in done.groups] == [1, 2, 4, 5]
    assert [p.position for p, _ in done.dropped] == [0, 3]
    assert done.reasons == {"all rewards are 1": 2}
    assert [p.position for p in done.unused] == list(range(6, len(source.drawn)))
    assert len(source.drawn) >= 4 + ahead
    settled = rollout.engine.ended
    await asyncio.sleep(0.05)
    assert rollout.engine.ended == settled


async def test_too_few_kept_groups_end_the_step_with_reasons(tokenizer_folder):
    with pytest.raises(RolloutError, match="too few groups") as caught:
        await collect(rollout_of(tokenizer_folder), Source().next, 4, max_prompts=5)
    assert "3 of 5 prompts" in caught.value.seen
    assert "all rewards are 1" in caught.value.seen


async def test_the_step_s_deadline_holds(tokenizer_folder):
    with pytest.raises(EngineTimeoutError, match="0 groups kept"):
        await collect(rollout_of(tokenizer_folder, delay=60, step_deadline_s=0.1), Source().next, 2)


def test_the_filter(make_group):
    assert differing_rewards(make_group(0, rewards=(1.0, 0.0))) == ""
    assert differing_rewards(make_group(0, rewards=(0.5, 0.5))) == "all rewards are 0.5"
