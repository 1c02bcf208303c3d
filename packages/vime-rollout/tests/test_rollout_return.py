"""Engines that are lost and come back: requests in flight are retried whole, elsewhere or after the return.

The faults are made with servers that misbehave on purpose; ``test_rollout_real_engine.py`` kills, hangs and restarts a
real engine under a rollout.
"""

from __future__ import annotations

import asyncio

import pytest
from vime_rollout import EnginePool, EngineState, GenerateRequest, RemoteEngine, SamplingParams
from vime_rollout.engine import EngineClient
from vime_rollout.errors import (
    EngineDeadError,
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    VersionMismatchError,
)

LONG = 120.0


def ask(seed, session=""):
    return GenerateRequest((5, 6), SamplingParams(max_tokens=4), seed=seed, session_id=session)


async def connect(server, name="e0", **options):
    settings = {"request_deadline_s": LONG, "control_deadline_s": LONG, "retries": 0, **options}
    engine = RemoteEngine(server.url, name=name, client=EngineClient(server.url, name=name, **settings))
    await engine.connect()
    return engine


async def until(condition):
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_hangs_is_sent_whole_to_the_server_that_took_the_place(start_server):
    old, new = start_server(3), start_server(3)
    old.answers = ["hang"] * 3
    engine = await connect(old)
    running = [asyncio.create_task(engine.generate(ask(seed), version=3)) for seed in (1, 2, 3)]
    await until(lambda: len(old.generations()) == 3)
    await engine.reconnect(new.url, version=3)
    answers = await asyncio.gather(*running)
    assert all(a.tokens == (7, 8, 1) for a in answers)
    by_seed = [sorted(s.generations(), key=lambda b: b["sampling_params"]["seed"]) for s in (old, new)]
    assert by_seed[0] == by_seed[1]
    assert (engine.url, engine.state, engine.version, engine.in_flight) == (new.url, EngineState.READY, 3, 0)
    await engine.stop()


async def test_what_waits_for_a_slot_goes_to_the_new_server_too(start_server):
    old, new = start_server(0), start_server(0)
    old.answers = ["hang"]
    engine = await connect(old, max_concurrency=1)
    running = [asyncio.create_task(engine.generate(ask(seed))) for seed in range(4)]
    await until(lambda: len(old.generations()) == 1 and engine.in_flight == 4)
    await engine.reconnect(new.url)
    await asyncio.gather(*running)
    assert (len(old.generations()), len(new.generations()), new.peak) == (1, 4, 1)
    await engine.stop()


async def test_a_request_of_a_version_is_never_answered_by_another_one(start_server):
    old, new = start_server(3), start_server(-1)
    old.answers = ["hang"]
    engine = await connect(old)
    running = asyncio.create_task(engine.generate(ask(1), version=3))
    await until(lambda: old.generations())
    with pytest.raises(VersionMismatchError, match="version 3") as caught:
        await engine.reconnect(new.url, version=3)
    assert caught.value.seen == "version -1"
    with pytest.raises(EngineError, match="torn weights"):
        await running
    assert new.generations() == []
    new.label = "3"  # somebody has sent the weights
    await engine.reconnect(version=3)
    assert (await engine.generate(ask(1), version=3)).versions[0].version == 3
    await engine.stop()


async def test_a_server_without_a_label_gets_one_of_no_run(start_server):
    engine = await connect(start_server(0))
    new = start_server(0)
    new.label = "default"
    await engine.reconnect(new.url)
    assert (engine.version, new.label) == (-1, "-1")
    with pytest.raises(VersionMismatchError):
        await engine.generate(ask(1), version=0)
    await engine.stop()


async def test_a_reconnect_that_fails_leaves_a_dead_engine_that_can_be_tried_again(start_server):
    old, gone, new = start_server(0), start_server(0), start_server(0)
    gone.close()
    engine = await connect(old)
    with pytest.raises(EngineError):
        await engine.reconnect(gone.url)
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineDeadError, match="when reconnecting"):
        await engine.generate(ask(1))
    await engine.reconnect(new.url)
    assert (await engine.generate(ask(1))).tokens == (7, 8, 1)
    await engine.stop()


async def test_two_reconnects_at_one_time_are_refused(start_server):
    server = start_server(0)
    engine = await connect(server)
    server.delay_s = 0.05
    first = asyncio.create_task(engine.reconnect())
    await asyncio.sleep(0)
    with pytest.raises(EngineStateError, match="starting already"):
        await engine.reconnect()
    await first
    assert engine.state is EngineState.READY
    await engine.stop()


async def test_a_pool_waits_for_its_only_engine_and_no_request_is_lost(start_server):
    old, new = start_server(5), start_server(5)
    old.answers = ["hang"] * 4
    engine = await connect(old)
    pool = EnginePool([engine], on_loss="wait", return_deadline_s=LONG)
    running = [asyncio.create_task(pool.generate(ask(seed), version=5)) for seed in range(4)]
    await until(lambda: len(old.generations()) == 4)
    old.close()  # it dies with all of them
    await until(lambda: "e0" in pool.lost)
    late = asyncio.create_task(pool.generate(ask(9), version=5))
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in [*running, late])
    await engine.give_up("the process ended")
    with pytest.raises(EngineStateError, match="does not serve"):
        pool.readmit("e0")
    await engine.reconnect(new.url, version=5)
    pool.readmit("e0")
    answers = await asyncio.gather(*running, late)
    assert len(answers) == len(new.generations()) == 5
    assert {a.versions[0].version for a in answers} == {5}
    assert pool.lost == {}
    await engine.stop()


async def test_a_lost_engine_leaves_at_once_and_only_its_sessions_move(start_server):
    servers = {f"e{i}": start_server(0) for i in range(3)}
    engines = {name: await connect(server, name) for name, server in servers.items()}
    pool = EnginePool(list(engines.values()), on_loss="reroute")
    sessions = [f"s{i}" for i in range(24)]

    async def homes():
        for server in servers.values():
            server.requests.clear()
        answers = await asyncio.gather(*(pool.generate(ask(0, s)) for s in sessions))
        return {s: a.engine for s, a in zip(sessions, answers, strict=True)}

    before = await homes()
    assert set(before.values()) == set(servers)
    await pool.lose("e1", EngineDeadError("engine died", where="engine e1"))
    without = await homes()
    assert servers["e1"].generations() == []
    assert {s: e for s, e in before.items() if e != "e1"} == {s: without[s] for s, e in before.items() if e != "e1"}
    new = await connect(start_server(0), "e1")
    assert pool.replace(new) is engines["e1"]
    assert await homes() == before
    for engine in [*engines.values(), new]:
        await engine.stop()


async def test_losing_an_engine_sends_what_it_has_in_flight_elsewhere(start_server):
    hung, well = start_server(0), start_server(0)
    engines = [await connect(hung, "e0"), await connect(well, "e1")]
    pool = EnginePool(engines, on_loss="reroute")
    homes = {s: (await pool.generate(ask(0, s))).engine for s in map(str, range(16))}
    session = next(s for s, home in homes.items() if home == "e0")
    hung.requests.clear()
    hung.answers = ["hang"] * 9
    running = [asyncio.create_task(pool.generate(ask(i, session))) for i in range(3)]
    await until(lambda: len(hung.generations()) == 3)
    await pool.lose("e0", EngineTimeoutError("engine hangs"))
    assert {a.engine for a in await asyncio.gather(*running)} == {"e1"}
    assert engines[0].state is EngineState.DEAD
    for engine in engines:
        await engine.stop()


async def test_an_error_of_a_replaced_engine_is_no_loss_of_its_successor(start_server):
    old, new = start_server(0), start_server(0)
    old.answers = ["hang"]
    pool = EnginePool([await connect(old)], on_loss="wait")
    running = asyncio.create_task(pool.generate(ask(1)))
    await until(lambda: old.generations())
    before = pool.replace(await connect(new))
    old.close()
    assert (await running).tokens == (7, 8, 1)
    assert (pool.lost, len(new.generations())) == ({}, 1)
    for engine in [before, *pool.engines]:
        await engine.stop()


async def test_a_request_that_kills_what_it_touches_does_not_go_round(start_server):
    servers = [start_server(0) for _ in range(4)]
    for server in servers:
        server.answers = ["drop"]
    engines = [await connect(server, f"e{i}") for i, server in enumerate(servers)]
    pool = EnginePool(engines, on_loss="reroute", max_losses=2)
    with pytest.raises(EngineError) as caught:
        await pool.generate(ask(1))
    assert "lost 2 engines" in caught.value.__notes__[-1]
    assert (sum(len(s.generations()) for s in servers), len(pool.lost)) == (2, 2)
    for engine in engines:
        await engine.stop()


async def test_waiting_for_a_return_has_a_deadline_and_a_reason(start_server):
    engine = await connect(start_server(0))
    pool = EnginePool([engine], on_loss="wait", return_deadline_s=0.05)
    await pool.lose("e0", EngineDeadError("engine died", seen="exit code 9"))
    with pytest.raises(EngineStateError, match="no engine can serve") as caught:
        await pool.generate(ask(1))
    assert "exit code 9" in str(caught.value.__cause__)
    patient = EnginePool([engine], on_loss="wait", return_deadline_s=LONG)
    await engine.stop()
    await engine.reconnect()
    await engine.stop()
    with pytest.raises(EngineStateError, match="e0 stopped"):  # on purpose: it would not come back by itself
        await patient.generate(ask(1))


async def test_strangers_are_refused(start_server):
    engine = await connect(start_server(0))
    pool = EnginePool([engine])
    other = RemoteEngine("http://127.0.0.1:9", name="e9")
    with pytest.raises(EngineStateError, match="no engine of this name"):
        pool.replace(other)
    with pytest.raises(EngineStateError, match="no engine of this name"):
        await pool.lose("e9", EngineDeadError("engine died"))
    with pytest.raises(EngineStateError, match="does not serve"):
        pool.replace(RemoteEngine("http://127.0.0.1:9", name="e0"))
    await engine.stop()


async def test_a_core_that_does_not_say_its_version_is_not_waited_for_longer_than_a_request(start_server):
    server = start_server(2)
    engine = await connect(server)
    server.label, server.answers = None, ["hang"]
    async with asyncio.timeout(LONG / 2):
        with pytest.raises(EngineTimeoutError, match="GET /weight_info"):
            await engine.generate(ask(1), version=3, deadline_s=0.2)
    assert server.generations() == []
    await engine.stop()
