"""A wave of requests is spread over small pools, because a pool does work in the square of what it holds."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from vime_rollout.engine.lanes import LANE, Lanes

WAVE = 6 * LANE


@pytest.mark.parametrize(("connections", "pools"), [(1, 1), (LANE, 1), (LANE + 1, 2), (WAVE, 6)])
def test_there_is_a_pool_for_every_so_many_connections(connections: int, pools: int) -> None:
    assert Lanes(connections, keepalive_s=1.0).count == pools


def test_a_wave_is_spread_evenly_and_everything_is_closed() -> None:
    async def run() -> tuple[list[int], list[int]]:
        arrived, release = 0, asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal arrived
            await reader.readuntil(b"\r\n\r\n")
            arrived += 1
            if arrived == WAVE:
                release.set()
            await release.wait()  # every request is in flight at the same time
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=WAVE)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        lanes = Lanes(WAVE, keepalive_s=30.0)
        async with server, httpx.AsyncClient(transport=lanes, base_url=url, timeout=60.0) as client:
            calls = [asyncio.create_task(client.get("/")) for _ in range(WAVE)]
            await asyncio.wait_for(release.wait(), 60.0)
            held = [len(pool._pool.connections) for pool in lanes._pools]
            answers = await asyncio.gather(*calls)
            assert [response.text for response in answers] == ["ok"] * WAVE
        return held, [len(pool._pool.connections) for pool in lanes._pools]

    held, left = asyncio.run(run())
    assert held == [LANE] * 6
    assert left == [0] * 6
