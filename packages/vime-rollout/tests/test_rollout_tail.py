"""What is done for many tokens and samples at a time gives what would come of doing it for each."""

from __future__ import annotations

import asyncio
import gc
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_rollout import (
    Encoder,
    GenerateRequest,
    Generation,
    Prompt,
    Rollout,
    RolloutConfig,
    SampleStatus,
    SamplingParams,
    VersionSpan,
)
from vime_rollout.engine import EngineClient
from vime_rollout.engine.request import LOGPROB_SENTINEL, parse_generations
from vime_rollout.errors import EngineResponseError, RewardError, SampleError, noting
from vime_rollout.rewards.grader import WorkerReward
from vime_rollout.sample import LOGPROB_SLACK, first_bad_logprob
from vime_rollout.testing import ScriptedEngine

ANY_FLOAT = st.floats() | st.sampled_from([-1.5e308, 1.5e308, -9999.0, -9998.9, 0.0, 0.01, 0.011, -0.5, 0, -3])


@given(st.lists(ANY_FLOAT, max_size=12), st.sampled_from([-math.inf, LOGPROB_SENTINEL]))
def test_logprobs_together_are_refused_where_the_first_alone_would_be(logprobs, above):
    bad = [i for i, x in enumerate(logprobs) if not math.isfinite(x) or x <= above or x > LOGPROB_SLACK]
    assert first_bad_logprob(tuple(logprobs), above) == (bad[0] if bad else None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, -9999.0])
@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_bad_logprob_among_many_is_named(good_completion, make_sample, value, position):
    body = good_completion([9] * 7)
    body["choices"][0]["logprobs"]["content"][position]["logprob"] = value
    with pytest.raises(EngineResponseError, match=rf"logprob of token {position}") as caught:
        parse_generations(body, 1, engine="e", max_tokens=7)
    assert caught.value.seen == repr(value)
    if value != LOGPROB_SENTINEL:
        logprobs = tuple(value if i == position else -0.5 for i in range(7))
        fields = {"tokens": (5, 6, *[9] * 7), "loss_mask": (1,) * 7, "versions": (VersionSpan(0, 0, 7),)}
        with pytest.raises(SampleError, match=rf"logprobs\[{position}\]"):
            make_sample(logprobs=logprobs, **fields)


@pytest.mark.parametrize("flag", [2, -1, 0.5, math.nan])
def test_a_mask_of_anything_else_is_refused(make_sample, flag):
    with pytest.raises(SampleError, match="loss_mask"):
        make_sample(loss_mask=(1, 1, flag))


@pytest.mark.parametrize("collecting", [True, False])
async def test_the_collector_is_left_as_it_was(faulty_server, good_completion, collecting):
    faulty_server.answers = [(200, good_completion([7])), (200, b"<html>"), (200, b""), (200, {"choices": []})]
    client = EngineClient(faulty_server.url, name="e")
    request = GenerateRequest((5, 6), SamplingParams(max_tokens=4), seed=11)
    try:
        if not collecting:
            gc.disable()
        assert (await client.generate(request)).tokens == (7,)
        assert gc.isenabled() is collecting
        for what in ("no JSON", "no completion", "number of choices"):
            with pytest.raises(EngineResponseError, match=what):
                await client.generate(request)
            assert gc.isenabled() is collecting
    finally:
        gc.enable()
        await client.close()


def test_texts_together_are_those_of_each_alone(tokenizer_folder):
    encoder = Encoder(tokenizer_folder)
    responses = [encoder.encode_text("1+1=2"), (), (*encoder.encode_text("ab"), 1), (1, 2)]
    for special in (False, True):
        texts = encoder.decode_many(responses, special=special)
        assert texts == [encoder.decode(response, special=special) for response in responses]
        slowly = [encoder._tokenizer.decode(list(r), skip_special_tokens=not special) for r in responses]
        assert texts == slowly
    assert encoder.decode_many([]) == []
    assert encoder.decode_many(responses)[2] == "ab"
    many = [encoder.encode_text("abc " * number) for number in range(60)]
    assert sum(map(len, many)) > 2048, "worth other cores"
    assert encoder.decode_many(many) == [encoder.decode(response) for response in many]


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(tokenizer_folder):
    encoder = Encoder(tokenizer_folder)
    plain = type(encoder._tokenizer)

    class Shouting(plain):
        def decode(self, token_ids, **options):
            return super().decode(token_ids, **options).upper()

    encoder._tokenizer.__class__ = Shouting
    assert encoder.decode_many([encoder.encode_text("ab"), encoder.encode_text("c")]) == ["AB", "C"]
    assert encoder.decode(encoder.encode_text("a")) == "A"


class OftenCut(ScriptedEngine):
    """An engine that cuts the samples of odd seeds after a token, unless they are asked for alone."""

    async def generate_many(self, request, count, **options):
        whole = await super().generate_many(request, count, **options)
        return tuple(self._cut(g) if (request.seed + i) % 2 else g for i, g in enumerate(whole))

    def _cut(self, whole):
        span = (VersionSpan(self.version, 0, 1),)
        return Generation(whole.tokens[:1], whole.logprobs[:1], span, SampleStatus.ABORTED, engine=self.name)


def indices(sample):
    return [sample.index, "from a grader"]


@pytest.mark.parametrize("kind", [ScriptedEngine, OftenCut])
async def test_samples_of_one_request_are_scored_each_for_itself(tokenizer_folder, kind):
    encoder = Encoder(tokenizer_folder)
    reward = WorkerReward("w", "builtins:tuple", indices, timeout_s=30, workers=2)
    config = RolloutConfig(samples_per_prompt=7, sampling=SamplingParams(max_tokens=5), max_context_tokens=64)
    try:
        prompt = Prompt(id="p", text="1+1=", label="2")
        (group,) = await Rollout(kind(range(4, 40)), encoder, reward, config).run([prompt])
    finally:
        reward.close()
    assert [sample.index for sample in group] == list(range(7))
    assert [sample.reward for sample in group] == [float(index) for index in range(7)]
    assert {len(sample.loss_mask) for sample in group} == {5}
    assert all(sample.timings.reward_s > 0 for sample in group)
    assert all(sample.response == encoder.decode(sample.tokens[sample.prompt_length :]) for sample in group)
    cut = [sample.timings.attempts == 2 for sample in group]
    assert any(cut) == (kind is OftenCut)


def failing(sample):
    return "no pair" if sample.index == 2 else [sample.index, "given"]


def refused(sample):
    if sample.index == 2:
        raise RewardError("no label", where="reward w")
    return [sample.index, "given"]


@pytest.mark.parametrize(("payload", "what"), [(failing, "grader failed"), (refused, "no label")])
async def test_the_sample_that_cannot_be_scored_is_named(make_sample, payload, what):
    reward = WorkerReward("w", "builtins:tuple", payload, timeout_s=30, workers=1)
    samples = [make_sample(index=index) for index in range(5)]
    try:
        with pytest.raises(RewardError, match=what) as caught:
            await reward.score_together(samples)
        assert caught.value.__notes__ == ["sample 2 of group p:0@0"]
        told = await reward.score_together([sample for sample in samples if sample.index != 2])
        assert [score.value for score, _ in told] == [0.0, 1.0, 3.0, 4.0]
        assert await reward.score_together([]) == []
    finally:
        reward.close()
    with pytest.raises(RewardError, match="closed"):
        await reward.score_together(samples[:2])


ENDING = """
import os
def grade(payload):
    if payload[0] == 4:  # the last of the batch: end when its answer is written, before that is told
        real = os.write
        os.write = lambda file, data: os._exit(3) if data == b"." else real(file, data)
    return payload
"""


async def test_a_worker_that_ends_after_its_last_answer_costs_no_score(make_sample, tmp_path, monkeypatch):
    (tmp_path / "ending_grader.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    reward = WorkerReward("w", "ending_grader:grade", indices, timeout_s=30, workers=1)
    try:
        reward._crew().seconds = 1e-6  # as after many quick payloads: all five are one batch
        for _ in range(2):
            told = await reward.score_together([make_sample(index=index) for index in range(5)])
            assert [score.value for score, _ in told] == [0.0, 1.0, 2.0, 3.0, 4.0]
    finally:
        reward.close()


async def test_scores_that_nobody_waits_for_any_more_are_not_made(make_sample):
    reward = WorkerReward("w", "builtins:tuple", indices, timeout_s=30, workers=1)
    try:
        given_up = asyncio.create_task(reward.score_together([make_sample(index=index) for index in range(3)]))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert (await reward.score(make_sample(index=5))).value == 5.0
    finally:
        reward.close()


async def test_nothing_to_score_is_scored_at_once():
    reward = WorkerReward("w", "builtins:tuple", indices, timeout_s=30)
    try:
        assert await asyncio.wait_for(reward.score_together([]), 5) == []
    finally:
        reward.close()


async def test_quick_payloads_of_a_call_go_to_one_worker_and_slow_ones_are_shared(make_sample):
    for seconds, sizes in ((1e-5, [6]), (1e-3, [3, 2, 1])):
        reward = WorkerReward("w", "builtins:tuple", indices, timeout_s=30, workers=2)
        crew, found = reward._crew(), []
        crew.seconds = seconds
        call = asyncio.create_task(reward.score_together([make_sample(index=index) for index in range(6)]))
        await asyncio.sleep(0)  # asked for; the tasks that grade have not begun
        while batch := crew._next_batch():
            found.append(len(batch))
        assert found == sizes
        call.cancel()
        reward.close()


def test_a_note_is_added_once():
    with pytest.raises(SampleError) as caught, noting("sample 1"), noting("sample 1"):
        raise SampleError("x")
    assert caught.value.__notes__ == ["sample 1"]
