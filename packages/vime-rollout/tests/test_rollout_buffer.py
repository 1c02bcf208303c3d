"""The data buffer: no prompt is lost or doubled, old groups expire by the rule, the state is exact."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vime_rollout import DataBuffer, Prompt
from vime_rollout.errors import DataBufferError, StateError


def prompt(position):
    return Prompt(id=f"p:{position}", text="1+1=", position=position, tokens=(5, 6))


def filled(make_group, versions, **options):
    buffer = DataBuffer(**options)
    buffer.begin([prompt(i) for i in range(len(versions))])
    for position, version in reversed(list(enumerate(versions))):
        buffer.admit(make_group(position, version))
    return buffer


def test_groups_leave_oldest_prompt_first(make_group):
    buffer = filled(make_group, [0, 0, 0])
    assert [g.prompt.position for g in buffer.take(2, version=0)] == [0, 1]
    assert [g.prompt.position for g in buffer.take(5, version=0)] == [2]
    assert buffer.take(1, version=0) == []


def test_old_groups_are_dropped_and_counted(make_group):
    buffer = filled(make_group, [1, 3, 2], max_lag=1)
    assert buffer.available(version=3) == 2
    assert sorted(buffer.lags(version=3)) == [0, 1, 2]
    assert [g.prompt.position for g in buffer.take(9, version=3)] == [1, 2]
    assert buffer.counts.expired_dropped == 1
    assert buffer.replays() == []


def test_old_groups_are_refreshed_on_request(make_group):
    buffer = filled(make_group, [0, 2], max_lag=1, on_expired="refresh")
    assert [g.prompt.position for g in buffer.take(9, version=2)] == [1]
    assert [p.position for p in buffer.replays()] == [0]
    assert buffer.replays() == []
    buffer.begin([prompt(0)])
    buffer.admit(make_group(0, 2))
    assert len(buffer.take(1, version=2)) == 1


def test_misuse_is_refused(make_group, make_sample):
    buffer = DataBuffer(capacity=2)
    with pytest.raises(DataBufferError, match="was not begun"):
        buffer.admit(make_group(0))
    buffer.begin([prompt(0)])
    with pytest.raises(DataBufferError, match="twice"):
        buffer.begin([prompt(0)])
    with pytest.raises(DataBufferError, match="no room"):
        buffer.begin([prompt(1), prompt(2)])
    assert buffer.room == 1
    unscored = type(make_group(0))(prompt(0), (make_sample(),))
    with pytest.raises(DataBufferError, match="not scored"):
        buffer.admit(unscored)
    buffer.admit(make_group(0))
    with pytest.raises(DataBufferError, match="inside already"):
        buffer.admit(make_group(0))
    with pytest.raises(DataBufferError, match="not in flight"):
        buffer.abandon("p:0@0")


def test_state_is_exact_and_what_was_in_flight_is_replayed(make_group):
    buffer = filled(make_group, [0, 1], max_lag=5)
    buffer.begin([prompt(7), prompt(8)])
    buffer.abandon("p:7@0", replay=True)
    state = json.loads(json.dumps(buffer.state_dict()))
    resumed = DataBuffer(max_lag=5)
    resumed.load_state_dict(state)
    assert [p.position for p in resumed.replays()] == [7, 8], "in the order of the data"
    assert resumed.in_flight == 0
    assert resumed.take(9, version=1) == buffer.take(9, version=1)
    with pytest.raises(StateError, match="format"):
        resumed.load_state_dict({**state, "format": 0})


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "admit", "take", "abandon", "replay", "reload"]), st.integers(0, 4)),
    max_size=40,
)


@given(steps=steps, refresh=st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_prompt_is_taken_once_or_counted_as_lost(make_group, steps, refresh):
    options = {"max_lag": 2, "on_expired": "refresh" if refresh else "drop"}
    buffer, version, fresh = DataBuffer(**options), 0, 0
    waiting, taken, queued = [], [], []
    for action, amount in steps:
        if action == "begin":
            new = [prompt(fresh + i) for i in range(amount)]
            fresh += amount
            buffer.begin(new)
            waiting += new
        elif action == "admit" and waiting:
            buffer.admit(make_group(waiting.pop(amount % len(waiting)).position, version))
        elif action == "abandon" and waiting:
            buffer.abandon(waiting.pop().group_id, replay=True)
        elif action == "take":
            taken += [g.prompt.position for g in buffer.take(amount, version=version)]
            version += 1
        elif action == "replay":
            queued = buffer.replays()
            buffer.begin(queued)
            waiting += queued
        elif action == "reload":
            state, buffer = json.loads(json.dumps(buffer.state_dict())), DataBuffer(**options)
            buffer.load_state_dict(state)
            waiting = []
        counts = buffer.counts
        assert counts.begun == counts.admitted + counts.abandoned + buffer.in_flight
        assert counts.admitted == counts.taken + counts.expired_dropped + counts.expired_refreshed + len(buffer)
    assert len(taken) == len(set(taken))
    inside = [g["prompt"]["position"] for g in buffer.state_dict()["groups"]]
    pending = [p.position for p in waiting] + [p.position for p in buffer.replays()]
    accounted = sorted([*taken, *inside, *pending])
    assert len(accounted) + buffer.counts.expired_dropped == fresh
    assert set(accounted) <= set(range(fresh))


def test_ready_waits_for_the_leading_prompts_and_not_for_the_quick_ones(make_group):
    buffer = DataBuffer()
    buffer.begin([prompt(i) for i in range(3)])
    buffer.admit(make_group(1))
    buffer.admit(make_group(2))
    assert not buffer.ready(2), "prompt 0 is in flight and comes first"
    buffer.admit(make_group(0))
    assert buffer.ready(3)
    assert not buffer.ready(4), "there are only three"


def test_expire_tells_whose_groups_went(make_group):
    buffer = filled(make_group, [0, 2, 1], max_lag=1, on_expired="refresh")
    assert [p.position for p in buffer.expire(version=3)] == [2, 0]
    assert buffer.expire(version=3) == []
    assert len(buffer) == 1
