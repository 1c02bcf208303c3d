"""The HTTP client against faults that a real engine cannot be brought to show: hangs, garbage, lost connections.

The well-behaved answers of the server here are checked against the real engine in ``test_rollout_real_engine.py``.
"""

from __future__ import annotations

import asyncio
import time
from threading import Barrier

import pytest
from vime_rollout import EngineState, GenerateRequest, RemoteEngine, SampleStatus, SamplingParams, VersionSpan
from vime_rollout.engine import EngineClient
from vime_rollout.errors import (
    EngineBusyError,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    RolloutError,
    VersionMismatchError,
)

REQUEST = GenerateRequest((5, 6), SamplingParams(max_tokens=4), seed=11, session_id="s")


def client_of(server, **options):
    return EngineClient(server.url, name="e", **{"request_deadline_s": 5.0, "control_deadline_s": 2.0, **options})


async def test_a_good_answer_is_parsed_and_all_parameters_are_sent(faulty_server):
    client = client_of(faulty_server)
    answer = await client.generate(REQUEST)
    assert (answer.tokens, answer.status, answer.attempts) == ((7, 8, 1), SampleStatus.COMPLETED, 1)
    assert answer.logprobs == (-0.25, -0.25, -0.25)
    assert answer.versions == (VersionSpan(0, 0, 3),)
    ((path, body),) = faulty_server.requests
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [5, 6]
    sent = body["sampling_params"]
    assert (sent["seed"], sent["max_tokens"], sent["logprobs"], sent["top_k"]) == (11, 4, 0, 0)
    assert sent["detokenize"] is False
    await client.close()


async def test_passing_failures_are_retried_with_the_same_request(faulty_server):
    faulty_server.answers = ["drop", (503, {"error": {"message": "busy"}})]
    client = client_of(faulty_server)
    answer = await client.generate(REQUEST)
    assert answer.attempts == 3
    bodies = [body for _, body in faulty_server.requests]
    assert bodies == [bodies[0]] * 3
    await client.close()


async def test_retries_are_bounded_and_the_last_error_is_told(faulty_server):
    faulty_server.answers = [(500, {"error": {"message": "kernel panic"}})] * 9
    client = client_of(faulty_server, retries=1)
    with pytest.raises(EngineBusyError, match="HTTP 500: kernel panic") as caught:
        await client.generate(REQUEST)
    assert len(faulty_server.requests) == 2
    assert caught.value.__notes__ == ["generate: 2 attempts"]
    await client.close()


async def test_no_retry_when_the_process_is_gone(faulty_server):
    faulty_server.answers = ["drop"] * 9
    client = client_of(faulty_server, alive=lambda: False)
    with pytest.raises(EngineBusyError, match="connection"):
        await client.generate(REQUEST)
    assert len(faulty_server.requests) == 1
    await client.close()


async def test_a_refusal_is_not_retried(faulty_server):
    faulty_server.answers = [(400, {"error": {"message": "prompt is too long"}}), (404, {"detail": "Not Found"})]
    client = client_of(faulty_server)
    with pytest.raises(EngineRequestError, match="HTTP 400: prompt is too long"):
        await client.generate(REQUEST)
    with pytest.raises(EngineRequestError, match="--enable-scale-out"):
        await client.generate(REQUEST)
    assert len(faulty_server.requests) == 2
    await client.close()


async def test_a_hang_ends_at_the_deadline(faulty_server):
    faulty_server.answers = ["hang", "hang"]
    client = client_of(faulty_server, request_deadline_s=0.3, control_deadline_s=0.2)
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"0\.3 s"):
        await client.generate(REQUEST)
    with pytest.raises(EngineTimeoutError, match="GET /health"):
        await client.control("GET", "/health")
    assert time.monotonic() - began < 60  # the server would hang for 300
    assert client.in_flight == 0
    await client.close()


async def test_concurrency_is_bounded(faulty_server):
    faulty_server.delay_s, faulty_server.meeting = 0.05, Barrier(3)
    client = client_of(faulty_server, max_concurrency=3)
    answers = await asyncio.gather(*(client.generate(REQUEST) for _ in range(12)))
    assert faulty_server.peak == 3
    assert max(a.queue_s for a in answers) > 0.1
    await client.close()


async def test_a_call_while_connections_are_being_closed_gets_new_ones(faulty_server):
    client = client_of(faulty_server)
    await client.control("GET", "/weight_info")
    going, closed = asyncio.Event(), asyncio.Event()
    http, close = client._http, client._http.aclose

    async def slow_close():
        await close()
        going.set()
        await closed.wait()

    http.aclose = slow_close
    cutting = asyncio.create_task(client.cut())
    await going.wait()
    assert await client.control("GET", "/weight_info") is not None
    closed.set()
    await cutting
    await client.close()


async def test_a_call_while_the_client_moves_goes_to_the_new_address(faulty_server):
    client = client_of(faulty_server)
    client.url, new = "http://127.0.0.1:9", client.url  # where nothing listens, and where the server is
    going, closed = asyncio.Event(), asyncio.Event()

    async def slow_close():
        going.set()
        await closed.wait()

    client._session().aclose = slow_close
    moving = asyncio.create_task(client.move(new))
    await going.wait()
    assert await client.control("GET", "/weight_info") is not None
    closed.set()
    await moving
    assert await client.control("GET", "/weight_info") is not None
    await client.close()


async def test_what_changes_nothing_is_asked_again(faulty_server):
    client = client_of(faulty_server, retries=1)
    faulty_server.answers = ["drop", (200, {"weight_version": "3"})]
    assert await client.read("/weight_info") == {"weight_version": "3"}
    faulty_server.answers = ["drop", "drop"]
    with pytest.raises(EngineBusyError, match="connection") as caught:
        await client.read("/weight_info")
    assert caught.value.__notes__ == ["GET /weight_info: 2 attempts"]
    faulty_server.answers = ["drop"]
    with pytest.raises(EngineBusyError, match="connection"):
        await client.control("POST", "/pause")
    await client.close()


def test_a_client_outlives_its_event_loop(faulty_server):
    client = client_of(faulty_server)
    for _ in range(2):
        assert asyncio.run(client.generate(REQUEST)).tokens == (7, 8, 1)


def broken(body, change):
    change(body["choices"][0])
    return body


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c["logprobs"]["content"].pop(), "logprobs"),
        (lambda c: c["logprobs"]["content"][0].update(token_id=9), "logprobs"),
        (lambda c: c["logprobs"]["content"][1].update(logprob=-9999.0), "NaN or -inf"),
        (lambda c: c["logprobs"]["content"][1].update(logprob=0.7), "at most 0"),
        (lambda c: c.update(weight_versions=None), "version spans"),
        (lambda c: c["weight_versions"][0].update(end=2), "version spans"),
        (lambda c: c["weight_versions"][0].update(version="default"), "no integer"),
        (lambda c: c.update(finish_reason="error"), "finish reason"),
        (lambda c: c.update(logprobs=None), "logprobs"),
        (lambda c: c.pop("token_ids"), "no completion"),
    ],
)
async def test_garbage_is_refused_and_named(faulty_server, good_completion, change, what):
    faulty_server.answers = [(200, broken(good_completion([7, 8, 1]), change))]
    client = client_of(faulty_server)
    with pytest.raises(EngineResponseError, match=what):
        await client.generate(REQUEST)
    await client.close()


async def test_other_garbage(faulty_server, good_completion):
    faulty_server.answers = [(200, b"<html>"), (200, {"choices": []}), (200, good_completion([7] * 5)), (200, [])]
    client = client_of(faulty_server)
    for what in ("no JSON", "number of choices", "at most 4", "no completion"):
        with pytest.raises(EngineResponseError, match=what):
            await client.generate(REQUEST)
    await client.close()


async def connected(server, label="0"):
    engine = RemoteEngine(server.url, name="e", client=client_of(server))
    server.answers = [(200, {}), (200, {"weight_version": label}), (200, {"weight_version": label})]
    await engine.connect()
    server.requests.clear()
    return engine


async def test_tokens_of_other_weights_are_refused(faulty_server, good_completion):
    engine = await connected(faulty_server, "4")
    faulty_server.answers = [(200, good_completion([7, 1], version="4")), (200, good_completion([7, 1], version="5"))]
    assert (await engine.generate(REQUEST, version=4)).versions == (VersionSpan(4, 0, 2),)
    with pytest.raises(VersionMismatchError, match=r"versions \[5\]"):
        await engine.generate(REQUEST, version=4)
    faulty_server.answers = [(200, {"weight_version": "4"})]
    with pytest.raises(VersionMismatchError) as caught:
        await engine.generate(REQUEST, version=6)
    assert (caught.value.seen, caught.value.expected) == ("version 4", "version 6")
    await engine.stop()


async def test_an_update_is_believed_only_when_the_engine_says_so(faulty_server):
    engine = await connected(faulty_server)
    faulty_server.answers = [(200, {"weight_version": "1"})]
    async with engine.updating(1):
        assert engine.state is EngineState.UPDATING
    assert (engine.version, engine.state) == (1, EngineState.READY)

    faulty_server.answers = [(200, {"weight_version": "1"})]
    with pytest.raises(VersionMismatchError):
        async with engine.updating(2):
            pass
    assert (engine.version, engine.state) == (1, EngineState.READY)

    faulty_server.answers = [(200, {"weight_version": "1"})]
    with pytest.raises(ValueError, match="transfer failed"):
        async with engine.updating(2):
            raise ValueError("transfer failed")
    assert (engine.version, engine.state) == (1, EngineState.READY)

    faulty_server.answers = [(500, {"error": "dead"})]
    with pytest.raises(ValueError, match="transfer failed"):
        async with engine.updating(2):
            raise ValueError("transfer failed")
    assert engine.state is EngineState.TORN
    with pytest.raises(RolloutError, match="torn weights"):
        await engine.generate(REQUEST)
    faulty_server.answers = [(200, {"weight_version": "3"})]
    async with engine.updating(3):
        pass
    assert engine.state is EngineState.READY
    await engine.stop()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"max_tokens": 4, "temperature": -1.0}, "temperature"),
        ({"max_tokens": 4, "top_p": 0.0}, "top_p"),
        ({"max_tokens": 4, "top_k": 0}, "top_k"),
        ({"max_tokens": 4, "min_p": 2.0}, "min_p"),
    ],
)
def test_sampling_parameters_are_checked(values, name):
    with pytest.raises(RolloutError, match=name):
        SamplingParams(**values)
