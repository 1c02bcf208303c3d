"""Generation that goes on by itself: the lag rule, the order of the data, and no prompt lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_integration.admission import admissible
from vime_integration.errors import PipelineError
from vime_integration.producer import Producer
from vime_rollout import Prompt, Sample, SampleGroup, SampleStatus, VersionSpan


class Counting:
    """A source whose prompts are numbers."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, n: int) -> list[Prompt]:
        prompts = [
            Prompt(id=f"p:{i}", text="?", position=i, tokens=(5,)) for i in range(self.position, self.position + n)
        ]
        self.position += n
        return prompts

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state) -> None:
        self.position = state["position"]


class Engines:
    """Generates one token a turn of the event loop, each from the version that is served then."""

    def __init__(self, seed: int = 0, fail_at: int | None = None) -> None:
        self.version = 1
        self.random = random.Random(seed)
        self.fail_at = fail_at

    async def group(self, prompt, *, version=None, slots=None) -> SampleGroup:
        async with slots.hold():
            if prompt.position == self.fail_at:
                raise RuntimeError("the engine is on fire")
            spans = []
            for place in range(self.random.randint(1, 6)):
                spans.append(VersionSpan(self.version, place, place + 1))
                for _ in range(self.random.randint(1, 8)):
                    await asyncio.sleep(0)
        length = len(spans)
        sample = Sample(
            prompt_id=prompt.id,
            group_id=prompt.group_id,
            index=0,
            tokens=(5,) * (1 + length),
            prompt_length=1,
            loss_mask=(1,) * length,
            logprobs=(-0.5,) * length,
            versions=tuple(spans),
            status=SampleStatus.COMPLETED,
            response="",
            reward=float(prompt.position % 2),
            reward_reason="even",
        )
        return SampleGroup(prompt, (sample,))


async def train(producer, engines, steps, *, first=1, turns=10):
    """Take and train `steps` batches; return the ledgers and the largest lag seen."""
    entries, largest = [], 0
    for version in range(first, first + steps):
        taken = await producer.take(version, deadline_s=30)
        entries.append(taken.ledger)
        largest = max([largest, *(version - group.oldest_version for group in taken.groups)])
        for _ in range(turns):  # training: generation goes on meanwhile
            await asyncio.sleep(0)
        engines.version = version + 1
        producer.weights_changed(version + 1)
    return entries, largest


@given(seed=st.integers(0, 99), batch=st.integers(1, 4), lag=st.integers(0, 3), turns=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_nothing_that_is_begun_becomes_too_old_and_batches_follow_the_data(seed, batch, lag, turns):
    async def scenario():
        engines = Engines(seed)
        producer = Producer(engines, Counting(), batch=batch, max_lag=lag, concurrency=8)
        producer.start(1)
        entries, largest = await train(producer, engines, 6, turns=turns)
        await producer.stop()
        return entries, largest

    entries, largest = asyncio.run(scenario())
    assert largest <= lag
    assert [position for entry in entries for position in entry.trained] == list(range(6 * batch))
    assert all(not entry.replayed and not entry.dropped for entry in entries), "no work was thrown away"


@pytest.mark.parametrize(
    ("waiting", "next_version", "engine_version", "expected"),
    [(0, 1, 1, 8), (4, 2, 1, 0), (4, 2, 2, 4), (0, 2, 1, 4), (9, 2, 2, 0)],
)
def test_how_far_generation_may_run_ahead(waiting, next_version, engine_version, expected):
    """A batch of 4 and a lag of 1: one batch more may wait, and none more while the next weights are being made."""
    settings = {"next_version": next_version, "engine_version": engine_version, "waiting": waiting}
    assert admissible(batch=4, max_lag=1, capacity=5, **settings) == min(expected, max(0, 5 - waiting))
    room = admissible(batch=4, max_lag=1, next_version=next_version, engine_version=engine_version, waiting=waiting)
    assert room == expected


@given(seed=st.integers(0, 99), stops=st.lists(st.integers(1, 3), min_size=1, max_size=4), turns=st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_killed_anywhere_every_prompt_is_trained_on_or_dropped_exactly_once(seed, stops, turns):
    """A kill loses what came after the last save; the resumed producer makes it again, and nothing twice."""

    def keep(group):
        return "" if group.prompt.position % 3 else "every third"

    async def scenario():
        saved, trained, dropped, version = None, [], [], 1
        for steps in stops:
            engines = Engines(seed)
            engines.version = version
            producer = Producer(engines, Counting(), batch=3, max_lag=2, concurrency=8, keep=keep)
            if saved is not None:
                producer.load_state_dict(json.loads(saved))
            producer.start(version)
            entries, largest = await train(producer, engines, steps, first=version, turns=turns)
            assert largest <= 2
            trained += [position for entry in entries for position in entry.trained]
            dropped += [position for entry in entries for position, _ in entry.dropped]
            version += steps
            saved = json.dumps(producer.state_dict())
            await train(producer, engines, 1, first=version)  # lost with the process
            await producer.stop()
        return trained, dropped

    trained, dropped = asyncio.run(scenario())
    reached = range(max(trained) + 1)
    assert trained == [position for position in reached if position % 3]
    # Those beyond are of batches that are not taken yet.
    assert sorted(position for position in dropped if position in reached) == [p for p in reached if not p % 3]


def test_in_flight_prompts_are_reported_as_replayed_after_a_resume():
    async def scenario():
        engines = Engines()
        producer = Producer(engines, Counting(), batch=2, max_lag=1, concurrency=8)
        producer.start(1)
        await asyncio.sleep(0)
        state = producer.state_dict()
        await producer.stop()
        resumed = Producer(engines, Counting(), batch=2, max_lag=1, concurrency=8)
        resumed.load_state_dict(state)
        resumed.start(1)
        taken = await resumed.take(1, deadline_s=30)
        await resumed.stop()
        return taken.ledger

    ledger = asyncio.run(scenario())
    assert ledger.trained == [0, 1]
    assert [position for position, _ in ledger.replayed] == [0, 1, 2, 3]


@pytest.mark.parametrize(("on_expired", "trained"), [("refresh", [2, 3]), ("drop", [6, 7])])
def test_what_is_too_old_after_a_resume_is_accounted_for(on_expired, trained):
    async def scenario():
        engines = Engines()
        before = Producer(engines, Counting(), batch=2, max_lag=2, concurrency=8)
        before.start(1)
        await before.take(1, deadline_s=30)
        while before.state_dict()["buffer"]["in_flight"]:
            await asyncio.sleep(0)
        state = json.loads(json.dumps(before.state_dict()))
        await before.stop()
        engines.version = 2
        resumed = Producer(engines, Counting(), batch=2, max_lag=0, concurrency=8, on_expired=on_expired)
        resumed.load_state_dict(state)
        resumed.start(2)
        taken = await resumed.take(2, deadline_s=30)
        await resumed.stop()
        assert {group.oldest_version for group in taken.groups} == {2}
        return taken.ledger

    ledger = asyncio.run(scenario())
    assert ledger.trained == trained
    expired = [(position, "too old for version 2") for position in range(2, 6)]
    told, other = (ledger.replayed, ledger.dropped) if on_expired == "refresh" else (ledger.dropped, ledger.replayed)
    assert (sorted(told), other) == (expired, [])


def test_a_filter_drops_with_a_reason_and_the_batch_is_full_all_the_same():
    async def scenario():
        engines = Engines()
        keep = lambda group: "" if group.rewards[0] else "reward 0"  # noqa: E731
        producer = Producer(engines, Counting(), batch=2, max_lag=0, concurrency=8, keep=keep)
        producer.start(1)
        entries, _ = await train(producer, engines, 2)
        await producer.stop()
        return entries

    entries = asyncio.run(scenario())
    assert [entry.trained for entry in entries] == [[1, 3], [5, 7]]
    assert [position for entry in entries for position, _ in entry.dropped][:4] == [0, 2, 4, 6]


def test_a_filter_that_drops_everything_ends_the_run_with_the_reason():
    async def scenario():
        producer = Producer(Engines(), Counting(), batch=1, max_lag=0, concurrency=8, keep=lambda _group: "never good")
        producer.start(1)
        try:
            await producer.take(1, deadline_s=30)
        finally:
            await producer.stop()

    with pytest.raises(PipelineError, match="never good"):
        asyncio.run(scenario())


def test_the_first_error_reaches_whoever_waits():
    async def scenario():
        producer = Producer(Engines(fail_at=1), Counting(), batch=2, max_lag=0, concurrency=8)
        producer.start(1)
        try:
            await producer.take(1, deadline_s=30)
        finally:
            await producer.stop()

    with pytest.raises(RuntimeError, match="on fire"):
        asyncio.run(scenario())


def test_a_batch_that_does_not_come_is_an_error_with_counts():
    class Stuck(Engines):
        async def group(self, prompt, *, version=None, slots=None) -> SampleGroup:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    async def scenario():
        producer = Producer(Stuck(), Counting(), batch=2, max_lag=1, concurrency=8)
        producer.start(1)
        try:
            await producer.take(1, deadline_s=0.05)
        finally:
            await producer.stop()

    with pytest.raises(PipelineError, match="0 groups ready and 4 in flight"):
        asyncio.run(scenario())
