"""Several samples in one request: what is sent and believed, when they are sent one by one, and the slots they take."""

from __future__ import annotations

import asyncio
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_rollout import GenerateRequest, RolloutConfig, SampleStatus, SamplingParams, Slots, VersionSpan
from vime_rollout.engine import EngineClient
from vime_rollout.engine.window import dialect_of
from vime_rollout.errors import EngineBusyError, EngineRequestError, EngineResponseError, RolloutError
from vime_rollout.together import all_of

REQUEST = GenerateRequest((5, 6), SamplingParams(max_tokens=4), seed=11, request_id="g")


def choice(good_completion, index, tokens, **options):
    (made,) = good_completion(tokens, **options)["choices"]
    return {**made, "index": index}


def client_of(server, **options):
    return EngineClient(server.url, name="e", **{"request_deadline_s": 5.0, **options})


async def test_one_request_brings_all_samples_in_the_order_of_their_seeds(faulty_server, good_completion):
    second = choice(good_completion, 1, [9], version="2", finish="length")
    faulty_server.answers = [(200, {"choices": [second, choice(good_completion, 0, [7, 8])]})]
    client = client_of(faulty_server)
    running = asyncio.create_task(client.generate_many(REQUEST, 2))
    await asyncio.sleep(0)
    assert client.in_flight == 2
    first, last = await running
    assert client.in_flight == 0
    assert (first.tokens, first.status) == ((7, 8), SampleStatus.COMPLETED)
    assert (last.tokens, last.status, last.versions) == ((9,), SampleStatus.TRUNCATED, (VersionSpan(2, 0, 1),))
    ((_, body),) = faulty_server.requests
    assert (body["sampling_params"]["n"], body["sampling_params"]["seed"], body["request_id"]) == (2, 11, "g")
    assert [REQUEST.alone(index).seed for index in range(2)] == [11, 12]
    await client.close()


@pytest.mark.parametrize("indices", [(0,), (0, 0), (0, 2), (0, 1, 2), ()])
async def test_missing_and_surplus_samples_are_refused(faulty_server, good_completion, indices):
    faulty_server.answers = [(200, {"choices": [choice(good_completion, index, [7]) for index in indices]})]
    client = client_of(faulty_server)
    with pytest.raises(EngineResponseError, match="0 to 1, each once"):
        await client.generate_many(REQUEST, 2)
    await client.close()


@pytest.mark.parametrize(
    ("temperature", "release", "asked"),
    [
        (1.0, "0.29.0", [(3, 11)]),
        (0.0, "0.32.0", [(1, 11), (1, 12), (1, 13)]),
        (1.0, "0.28.0", [(1, s) for s in (11, 12, 13)]),
    ],
)
async def test_an_engine_that_cannot_is_asked_once_for_each(start_server, good_completion, temperature, release, asked):
    server = start_server(0)
    client = client_of(server)
    client.dialect = dialect_of(release, where="engine e")
    sampling = SamplingParams(max_tokens=4, temperature=temperature)
    if len(asked) == 1:
        server.answers = [(200, {"choices": [choice(good_completion, index, []) for index in range(3)]})]
    else:
        server.answers = [(200, good_completion([]))] * 3
    running = asyncio.create_task(client.generate_many(GenerateRequest((5,), sampling, seed=11, request_id="g"), 3))
    await asyncio.sleep(0)
    assert client.in_flight == 3  # at once, or a pool would send everything to one engine
    assert len(await running) == 3
    bodies = server.generations()
    assert sorted((body["sampling_params"]["n"], body["sampling_params"]["seed"]) for body in bodies) == asked
    assert {body["request_id"] for body in bodies} == {"g"}
    await client.close()


async def test_the_first_refusal_ends_those_that_are_asked_one_by_one(start_server):
    server = start_server(0)
    server.answers = ["hang", (400, {"error": {"message": "too long"}}), "hang"]
    client = client_of(server)
    greedy = GenerateRequest((5,), SamplingParams(max_tokens=4, temperature=0.0))
    with pytest.raises(EngineRequestError, match="too long"):
        await asyncio.wait_for(client.generate_many(greedy, 3), 60)  # the server would hang for 300
    assert client.in_flight == 0
    await client.close()


async def test_samples_of_one_request_are_lost_and_asked_for_together(start_server, good_completion):
    server = start_server(0)
    server.answers = ["drop", (200, {"choices": [choice(good_completion, index, [7]) for index in range(2)]})]
    client = client_of(server)
    assert [answer.attempts for answer in await client.generate_many(REQUEST, 2)] == [2, 2]
    first, second = server.generations()
    assert first == second
    server.answers = ["hang"]
    running = asyncio.create_task(client.generate_many(REQUEST, 2))
    while len(server.generations()) < 3:
        await asyncio.sleep(0.01)
    await client.cut()
    with pytest.raises(EngineBusyError, match="given up"):
        await running
    assert client.in_flight == 0


async def test_concurrency_counts_samples(start_server, good_completion):
    server = start_server(0)
    server.delay_s, server.meeting = 0.05, Barrier(2)
    client = client_of(server, max_concurrency=5)
    pair = {"choices": [choice(good_completion, index, [7]) for index in range(2)]}
    server.answers = [(200, pair)] * 8
    await asyncio.gather(*(client.generate_many(REQUEST, 2) for _ in range(8)))
    assert server.peak == 2
    server.meeting = None
    nine = {"choices": [choice(good_completion, index, [7]) for index in range(9)]}
    server.answers = [(200, nine)]
    assert len(await client.generate_many(REQUEST, 9)) == 9  # more than there are slots: it has all of them
    await client.close()


@pytest.mark.parametrize("field", ["samples_per_prompt", "concurrency", "samples_per_request"])
def test_a_rollout_of_nothing_is_refused(field):
    values = {"samples_per_prompt": 2, "sampling": SamplingParams(max_tokens=4), "max_context_tokens": 16}
    with pytest.raises(RolloutError, match=f"rollout field {field}"):
        RolloutConfig(**{**values, field: 0})


STEPS = st.lists(st.tuples(st.sampled_from(["hold", "leave", "cancel"]), st.integers(1, 7)), max_size=40)


@given(count=st.integers(1, 5), steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_slots_are_never_too_many_never_lost_and_given_in_order(count, steps):
    async def scenario():
        slots, held, given_out = Slots(count), 0, []
        leave, tasks = {}, {}

        async def work(name, wanted):
            nonlocal held
            async with slots.hold(wanted):
                taken = min(wanted, count)
                held += taken
                given_out.append(name)
                assert held <= count
                try:
                    await leave[name].wait()
                finally:
                    held -= taken

        for name, (kind, wanted) in enumerate(steps):
            if kind == "hold":
                for _ in range(3):  # until whoever was given slots knows it: they note themselves in that order
                    await asyncio.sleep(0)
                leave[name] = asyncio.Event()
                tasks[name] = asyncio.create_task(work(name, wanted))
            elif kind == "leave" and tasks:
                leave[list(tasks)[wanted % len(tasks)]].set()
            elif tasks:
                tasks[list(tasks)[wanted % len(tasks)]].cancel()
            if wanted % 2:  # so that some cancellations hit in the moment in which slots are given
                await asyncio.sleep(0)
        for event in leave.values():
            event.set()
        await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
        assert given_out == sorted(given_out)
        async with asyncio.timeout(60):
            async with slots.hold(count):  # all are there again
                assert held == 0

    asyncio.run(scenario())


async def test_the_first_error_cancels_the_others_and_is_raised_when_they_have_ended():
    ended = []

    async def wait(name):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(name)

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await all_of([wait(1), fail(), wait(2)])
    assert sorted(ended) == [1, 2]
    assert await all_of(asyncio.sleep(0, result=i) for i in range(3)) == [0, 1, 2]
