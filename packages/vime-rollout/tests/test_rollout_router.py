"""The real vllm-router in front of servers that can be made to die: sessions stay, dead engines leave."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from vime_rollout import EngineClient, GenerateRequest, RemoteEngine, SamplingParams
from vime_rollout.errors import EngineDeadError, EngineError, EngineStartError, EngineStateError, VersionMismatchError
from vime_rollout.experimental import RoutedEngines, Router, RouterConfig

SESSIONS = [f"s{i}" for i in range(16)]


def ask(session):
    return GenerateRequest((5, 6), SamplingParams(max_tokens=4), seed=1, session_id=session)


async def connect(server, name):
    client = EngineClient(server.url, name=name, retries=0)
    engine = RemoteEngine(server.url, name=name, client=client)
    await engine.connect()
    return engine


@pytest_asyncio.fixture
async def routed(start_server, tmp_path):
    """A router in front of three servers."""
    servers = {f"e{i}": start_server(3) for i in range(3)}
    engines = [await connect(server, name) for name, server in servers.items()]
    # Its own health checks come too late for these tests, so what is seen is ours.
    config = RouterConfig(log_path=str(tmp_path / "router.log"), health_interval_s=600)
    async with Router(config, [server.url for server in servers.values()]) as router:
        yield RoutedEngines(router, engines), servers
    assert router.pids == []
    for engine in engines:
        await engine.stop()


async def homes(engines, servers):
    found = {}
    for session in SESSIONS:
        before = {name: len(server.generations()) for name, server in servers.items()}
        await engines.generate(ask(session), version=3)
        (found[session],) = (n for n, server in servers.items() if len(server.generations()) > before[n])
    return found


async def test_sessions_stay_and_a_dead_engine_leaves_at_once_and_comes_back(routed, start_server):
    engines, servers = routed
    await engines.router.health()
    before = await homes(engines, servers)
    assert await homes(engines, servers) == before
    with pytest.raises(VersionMismatchError, match="version 4 only"):
        await engines.generate(ask("s0"), version=4)

    dead = before["s0"]
    left = {name: server for name, server in servers.items() if name != dead}
    servers[dead].close()
    mine = [session for session, home in before.items() if home == dead]
    answers = await asyncio.gather(*(engines.generate(ask(session), version=3) for session in mine))
    assert len(answers) == len(mine)
    assert list(engines.lost) == [dead]
    assert sorted(await engines.router.workers()) == sorted(server.url for server in left.values())
    without = await homes(engines, left)
    assert {s: h for s, h in before.items() if h != dead} == {s: h for s, h in without.items() if before[s] != dead}

    with pytest.raises(EngineError):
        await engines.engines[dead].reconnect()
    with pytest.raises(EngineStateError, match="cannot be brought back"):
        await engines.readmit(dead)
    new = start_server(3)
    await engines.engines[dead].reconnect(new.url, version=3)
    await engines.readmit(dead)
    assert new.url in await engines.router.workers()
    assert engines.lost == {}
    after = await homes(engines, {**left, dead: new})
    assert all(after[session] in (home, dead) for session, home in without.items())


async def test_the_last_engine_and_the_router_itself_are_told_with_their_cause(routed):
    engines, servers = routed
    for name in ("e0", "e1"):
        await engines.lose(name, EngineDeadError("engine died", seen="exit code 9"))
    assert await engines.router.workers() == [servers["e2"].url]
    await engines.generate(ask("s"))
    await engines.lose("e2", EngineDeadError("engine died"))
    with pytest.raises(EngineStateError, match="no engine is left") as caught:
        await engines.generate(ask("s"))
    assert "exit code 9" in str(caught.value.__cause__)
    engines._return_deadline_s = 300.0
    waiting = asyncio.create_task(engines.generate(ask("s")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await engines.readmit("e2")
    assert (await waiting).tokens == (7, 8, 1)
    assert await engines.router.workers() == [servers["e2"].url]
    for server in servers.values():  # taken out, and not ended
        engine = await connect(server, "again")
        await engine.health()
        await engine.stop()
    engines._lost.clear()
    await engines.router.stop()
    with pytest.raises(EngineDeadError, match="router is dead"):
        await engines.generate(ask("s"))


async def test_engines_that_do_not_stamp_tokens_are_refused(start_server):
    server = start_server(0)
    server.release = "0.31.0"
    engine = await connect(server, "e0")
    with pytest.raises(EngineStateError, match="does not stamp tokens"):
        RoutedEngines(Router(RouterConfig(), [server.url]), [engine])
    await engine.stop()


async def test_a_router_that_cannot_start_says_why(tmp_path, monkeypatch):
    config = RouterConfig(log_path=str(tmp_path / "router.log"), arguments=("--no-such-option",))
    router = Router(config, ["http://127.0.0.1:9"])
    with pytest.raises(EngineStartError, match="no-such-option"):
        await router.start()
    assert router.pids == []
    monkeypatch.setattr("vime_rollout.experimental.router.find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match=r"vime-rollout\[router\]"):
        await Router(RouterConfig(), []).start()
