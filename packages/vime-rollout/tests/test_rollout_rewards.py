"""Rewards: right scores, a reason for every zero, time-outs that hold, and failures that are told."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from vime_rollout import DataConfig, Score, load_reward, open_data_source
from vime_rollout.errors import RewardError
from vime_rollout.rewards.grader import WorkerReward

THIS = "reward_functions_for_tests"


async def length(sample, *, scale=1.0):
    return len(sample.response) * scale


async def slow(sample):
    await asyncio.sleep(30)
    return 1.0


async def broken(sample):
    raise KeyError("oops")


async def not_a_number(sample):
    return math.nan


async def a_truth(sample):
    return True


async def with_reason(sample):
    return Score(0.0, "too short")


def not_async(sample):
    return 1.0


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Make this module importable under a dotted path, as a user's would be."""
    monkeypatch.setitem(sys.modules, THIS, sys.modules[__name__])


@pytest.mark.parametrize(
    ("response", "options", "value", "reason"),
    [
        ("42", {}, 1.0, ""),
        ("  42\n", {}, 1.0, ""),
        ("43", {}, 0.0, "'43' differs from label '42'"),
        ("so <a>41</a> no, <a>42</a>", {"pattern": "<a>(.*?)</a>"}, 1.0, ""),
        ("42", {"pattern": "<a>(.*?)</a>"}, 0.0, "no answer"),
    ],
)
async def test_exact_match(make_sample, response, options, value, reason):
    reward = load_reward("exact_match", options=options)
    score = await reward.score(make_sample(response=response, label="42"))
    assert score.value == value
    assert reason in score.reason
    assert (score.reason == "") == (value == 1.0)


async def test_exact_match_options_and_misuse(make_sample):
    folded = load_reward("exact_match", options={"ignore_case": True})
    assert (await folded.score(make_sample(response="A", label="a"))).value == 1.0
    with pytest.raises(RewardError, match="needs a label"):
        await load_reward("exact_match").score(make_sample(label=None))
    with pytest.raises(RewardError, match="one group"):
        await load_reward("exact_match", options={"pattern": "a"}).score(make_sample())
    with pytest.raises(RewardError, match="regular expression"):
        await load_reward("exact_match", options={"pattern": "("}).score(make_sample())


async def test_custom_functions_by_dotted_path(make_sample):
    sample = make_sample(response="1234")
    assert (await load_reward(f"{THIS}:length").score(sample)).value == 4.0
    assert (await load_reward(f"{THIS}.length", options={"scale": 0.5}).score(sample)).value == 2.0
    zero = await load_reward(f"{THIS}:length").score(make_sample(response=""))
    assert zero == Score(0.0, f"{THIS}:length answered 0 without a reason")
    assert await load_reward(f"{THIS}:with_reason").score(sample) == Score(0.0, "too short")


async def test_a_slow_function_scores_zero_with_the_reason(make_sample):
    began = time.monotonic()
    score = await load_reward(f"{THIS}:slow", timeout_s=0.1).score(make_sample())
    assert score == Score(0.0, "timed out after 0.1 s")
    assert time.monotonic() - began < 20  # it would take 30


async def test_failures_of_functions_are_told_with_their_cause(make_sample):
    with pytest.raises(RewardError, match="KeyError: 'oops'") as caught:
        await load_reward(f"{THIS}:broken").score(make_sample())
    assert isinstance(caught.value.__cause__, KeyError)
    for name in ("not_a_number", "a_truth"):
        with pytest.raises(RewardError, match="no finite number"):
            await load_reward(f"{THIS}:{name}").score(make_sample())


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("exact", {}, "unknown reward"),
        ("no.such.module:fn", {}, "cannot be imported"),
        (f"{THIS}:nothing", {}, "cannot be imported"),
        (f"{THIS}:not_async", {}, "not async"),
        (f"{THIS}:length", {"wrong": 1}, "does not take"),
        ("math_verify", {"x": 1}, "does not take an option"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(name, options, what):
    with pytest.raises(RewardError, match=what):
        load_reward(name, options=options)


@pytest.fixture(scope="module")
def math_reward():
    reward = load_reward("math_verify", workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("response", "label", "value", "reason"),
    [
        (r"so the answer is \boxed{0.5}", r"\frac{1}{2}", 1.0, ""),
        ("it is 1,000", "1000", 1.0, ""),
        (r"$x+1$", "1+x", 1.0, ""),
        ("it is 41", "42", 0.0, "answer '41' differs from label '42'"),
        ("no idea", "42", 0.0, "no answer"),
        ("42", "", 0.0, "label"),
    ],
)
async def test_math_verify(math_reward, make_sample, response, label, value, reason):
    score = await math_reward.score(make_sample(response=response, label=label))
    assert score.value == value
    assert reason in score.reason


async def test_a_mad_expression_times_out_and_the_next_is_graded(make_sample):
    reward = load_reward("math_verify", workers=1, timeout_s=3.0)
    try:
        assert (await reward.score(make_sample(response="$1$", label="1"))).value == 1.0
        mad = make_sample(response=r"$9^{9^{9^{9}}}$", label=r"$9^{9^{9^{8}}}$")
        score = await reward.score(mad)
        assert (score.value, score.reason) == (0.0, "timed out after 3 s")
        assert (await reward.score(make_sample(response="$2$", label="2"))).value == 1.0
    finally:
        reward.close()


async def test_one_that_times_out_costs_the_others_of_its_batch_nothing(make_sample):
    reward = load_reward("math_verify", workers=1, timeout_s=3.0)
    right = [make_sample(index=i, response=f"${i}$", label=f"{i}") for i in range(24)]
    mad = make_sample(response=r"$9^{9^{9^{9}}}$", label=r"$9^{9^{9^{8}}}$")
    try:
        for sample in right:  # until it knows how quick they are
            await reward.score(sample)
        scores = await asyncio.gather(*map(reward.score, [*right[:3], mad, *right[3:]]))
    finally:
        reward.close()
    assert [score.value for score in scores] == [1.0] * 3 + [0.0] + [1.0] * 21
    assert scores[3].reason == "timed out after 3 s"


@pytest.mark.parametrize("size", [1, 3000, 100_000])
async def test_every_payload_gets_its_own_score(make_sample, size):
    reward = WorkerReward("w", "builtins:tuple", lambda sample: [sample.index, "x" * size], timeout_s=30, workers=2)
    samples = [make_sample(index=index) for index in range(200 if size < 10_000 else 20)]
    try:
        for _ in range(3):  # one at a time at first, then in batches
            scores = await asyncio.gather(*map(reward.score, samples))
            assert [score.value for score in scores] == [sample.index for sample in samples]
        given_up = asyncio.create_task(reward.score(samples[1]))
        await asyncio.sleep(0)
        given_up.cancel()
        assert (await reward.score(samples[2])).value == 2.0
    finally:
        reward.close()


async def test_what_is_not_graded_when_it_is_closed_ends(make_sample):
    reward = WorkerReward("w", "time:sleep", lambda sample: 60, timeout_s=60, workers=1)
    first, second = (asyncio.create_task(reward.score(make_sample(index=index))) for index in range(2))
    await asyncio.sleep(0)
    (crew,) = reward._crews.values()
    while not (crew.busy and len(crew.waiting) == 1):
        await asyncio.sleep(0.01)
    reward.close()
    with pytest.raises(RewardError):
        await first
    with pytest.raises(asyncio.CancelledError):
        await second
    with pytest.raises(RewardError, match="is closed"):
        await reward.score(make_sample())


def test_workers_go_over_to_the_next_loop_and_those_left_in_work_end(make_sample, tmp_path, monkeypatch):
    (tmp_path / "slow_grader.py").write_text(
        "import time\ndef grade(p):\n    time.sleep(p[0])\n    return p[1], 'given'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    slow = {3: 50}
    reward = WorkerReward("w", "slow_grader:grade", lambda s: [slow.get(s.index, 0), s.index], timeout_s=60, workers=1)
    try:
        assert asyncio.run(reward.score(make_sample(index=1))).value == 1.0
        ((worker,),) = [crew.idle for crew in reward._crews.values()]
        assert asyncio.run(reward.score(make_sample(index=2))).value == 2.0
        ((again,),) = [crew.idle for crew in reward._crews.values()]
        assert again is worker
        with pytest.raises(TimeoutError):  # which leaves the task that grades to the end of the loop
            asyncio.run(asyncio.wait_for(reward.score(make_sample(index=3)), 1))
        assert asyncio.run(reward.score(make_sample(index=4))).value == 4.0
        assert worker._process.poll() is not None, "in the middle of something, and nobody listens"
    finally:
        reward.close()


async def test_gym_scores_by_the_task_itself(make_sample):
    config = DataConfig(gym_task="chain_sum", gym_seed=1, gym_size=4, gym_options={"max_terms": 2})
    prompt = open_data_source(config).next(1)[0]
    reward = load_reward("reasoning_gym", workers=1, options={"answer_tag": "answer"})
    try:
        right = make_sample(response=f"<answer>{prompt.label}</answer>", metadata=prompt.metadata)
        assert (await reward.score(right)).value == 1.0
        wrong = await reward.score(make_sample(response="<answer>x</answer>", metadata=prompt.metadata))
        assert wrong.value < 1.0
        assert f"label '{prompt.label}'" in wrong.reason
        untagged = await reward.score(make_sample(response=str(prompt.label), metadata=prompt.metadata))
        assert untagged == Score(0.0, "no answer: no <answer> in the response")
        with pytest.raises(RewardError, match="not of a reasoning-gym task"):
            await reward.score(make_sample())
    finally:
        reward.close()


async def test_workers_fail_with_the_cause_and_end_when_closed(make_sample):
    before = set(psutil.Process().children())
    reward = WorkerReward("w", "os:getenv", lambda sample: {"not": "a name"}, timeout_s=5, workers=1)
    with pytest.raises(RewardError, match=r"grader failed.*TypeError"):
        await reward.score(make_sample())
    (worker,) = set(psutil.Process().children()) - before
    reward.close()
    assert not worker.is_running()
    dying = WorkerReward("w", "os:_exit", lambda sample: 7, timeout_s=5, workers=1)
    with pytest.raises(RewardError, match=r"died.*exit code 7"):
        await dying.score(make_sample())
    dying.close()
    missing = WorkerReward("w", "no_such_module:f", lambda sample: {}, timeout_s=5, workers=1)
    with pytest.raises(RewardError, match="does not start"):
        await missing.score(make_sample())
    missing.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_worker_ends_with_its_parent(busy):
    """One that grades has nobody left to end it: that is what the kernel's timer is for."""
    code = (
        "from vime_rollout.rewards.process import GradingProcess; import asyncio, sys, time\n"
        "async def ready(w):\n"
        "    w.move_to(asyncio.get_running_loop()); await w.until_ready()\n"
        "w = GradingProcess('time:sleep'); asyncio.run(ready(w))\n"
        "if sys.argv[1] == 'True': w._process.stdin.write(b'{\"timeout_s\": 1, \"payload\": 600}\\n')\n"
        "print(w._process.pid, flush=True); time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(busy)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(5)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):  # it ended before it was looked at, or between two looks
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the worker outlives its parent"
            time.sleep(0.05)
