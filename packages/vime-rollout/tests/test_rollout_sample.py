"""Samples and groups: every invariant is checked when one is made."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_rollout import Prompt, Sample, SampleGroup, SampleStatus, Timings, VersionSpan, full_length
from vime_rollout.errors import SampleError


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loss_mask": (1, 1)}, "loss_mask"),
        ({"logprobs": (-0.5,)}, "logprobs"),
        ({"loss_mask": (1, 2, 1)}, "loss_mask"),
        ({"logprobs": (-0.5, float("nan"), -1.0)}, r"logprobs\[1\]"),
        ({"logprobs": (-0.5, -1.0, 0.5)}, r"logprobs\[2\]"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 6}, "prompt_length"),
        ({"versions": (VersionSpan(0, 0, 2),)}, "no version for response token 2"),
        ({"versions": (VersionSpan(0, 0, 4),)}, "versions"),
        ({"versions": (VersionSpan(0, 1, 3), VersionSpan(1, 0, 1))}, "versions"),
        ({"versions": (VersionSpan(0, 0, 2), VersionSpan(1, 1, 3))}, "versions"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": 0.0}, "reward_reason"),
    ],
)
def test_broken_sample_is_refused_by_name(make_sample, changes, names):
    with pytest.raises(SampleError, match=names) as caught:
        make_sample(**changes)
    assert caught.value.where == "sample 0 of group p:0@0"
    assert caught.value.expected


def test_masked_tokens_need_no_version(make_sample):
    sample = make_sample(loss_mask=(1, 0, 1), versions=(VersionSpan(4, 0, 1), VersionSpan(6, 2, 3)))
    assert sample.trained_tokens == 2
    assert (sample.oldest_version, sample.newest_version) == (4, 6)


def test_a_sample_is_scored_once_and_never_changed(make_sample):
    sample = make_sample()
    scored = sample.scored(0.0, "wrong", reward_s=0.25)
    assert (scored.reward, scored.reward_reason, scored.timings.reward_s) == (0.0, "wrong", 0.25)
    timings = dataclasses.replace(sample.timings, reward_s=0.25)
    assert scored == dataclasses.replace(sample, reward=0.0, reward_reason="wrong", timings=timings)
    assert sample.reward is None
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(SampleError, match="field reward is wrong"):
            sample.scored(wrong, "no number")
    with pytest.raises(SampleError, match=r"already 0\.0"):
        scored.scored(1.0)
    with pytest.raises(AttributeError):
        scored.reward = 1.0
    with pytest.raises(SampleError, match="reason"):
        sample.scored(0.0)


def test_full_length_puts_values_at_the_tokens_they_predict(make_sample):
    sample = make_sample()
    assert full_length(sample, sample.logprobs) == (0.0, 0.0, -0.5, -1.0, -1.5)
    with pytest.raises(SampleError, match="2 values"):
        full_length(sample, (1.0, 2.0))


@st.composite
def samples(draw):
    prompt_length = draw(st.integers(1, 5))
    length = draw(st.integers(0, 8))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    edges = [0, *cuts, length] if length else []
    spans = tuple(VersionSpan(draw(st.integers(0, 9)), start, end) for start, end in itertools.pairwise(edges))
    reward = draw(st.none() | st.floats(-1, 1, allow_nan=False))
    return Sample(
        prompt_id="p:1",
        group_id="p:1@2",
        index=draw(st.integers(0, 7)),
        tokens=tuple(
            draw(st.lists(st.integers(0, 99), min_size=prompt_length + length, max_size=prompt_length + length))
        ),
        prompt_length=prompt_length,
        loss_mask=tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
        logprobs=tuple(draw(st.lists(st.floats(-50, 0, allow_nan=False), min_size=length, max_size=length))),
        versions=spans,
        status=draw(st.sampled_from(SampleStatus)),
        response=draw(st.text(max_size=5)),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        label=draw(st.none() | st.text(max_size=3)),
        metadata={"k": [1, {"a": None}]},
        reward=reward,
        reward_reason="because" if reward == 0 else "",
        timings=Timings(0.5, 1.5, 0.25, 2, "engine-1"),
    )


@given(samples())
def test_json_and_pickle_give_back_the_same_sample(sample):
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_group_checks_identity(make_sample, make_group):
    prompt = Prompt(id="p:0", text="x")
    with pytest.raises(SampleError, match="empty"):
        SampleGroup(prompt, ())
    with pytest.raises(SampleError, match="another group") as caught:
        SampleGroup(prompt, (make_sample(), make_sample(index=1, group_id="p:9@0")))
    assert caught.value.seen == "p:9@0"
    with pytest.raises(SampleError, match="twice"):
        SampleGroup(prompt, (make_sample(), make_sample()))
    with pytest.raises(SampleError, match="not scored"):
        _ = SampleGroup(prompt, (make_sample(),)).rewards
    group = make_group(3, version=7, rewards=(1.0, 0.0, 0.5))
    assert group.rewards == (1.0, 0.0, 0.5)
    assert group.oldest_version == 7
    assert SampleGroup.from_dict(json.loads(json.dumps(group.to_dict()))) == group


def test_prompt_has_one_form():
    with pytest.raises(SampleError, match="messages and text"):
        Prompt(id="a", text="x", messages=({"role": "user", "content": "x"},))
    with pytest.raises(SampleError, match="empty"):
        Prompt(id="a")
    prompt = Prompt(id="a", messages=({"role": "user", "content": "x"},), epoch=2, metadata={"k": 1}, tokens=(1, 2))
    assert prompt.group_id == "a@2"
    assert Prompt.from_dict(json.loads(json.dumps(prompt.to_dict()))) == prompt
