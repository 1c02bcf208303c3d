"""Many connections to one server without the cost of one large pool.

httpcore looks at every connection of its pool whenever a request begins or ends, so ``n`` requests in flight cost
``n`` looks each, and a wave of them costs ``n`` squared: with 512 connections the client is busy for seconds before a
token is asked for. Several pools side by side, used in turn, keep each of them small: with four connections each, a
request in a wave of 256 costs the client a third less than with sixteen, and half of them would save little more.
"""

from __future__ import annotations

import itertools

import httpx

#: Connections that one pool is meant to hold.
LANE = 4


class Lanes(httpx.AsyncBaseTransport):
    """A transport that deals requests out to pools in turn.

    Args:
        connections: Most connections at a time, over all pools; whoever sends requests keeps to it.
        keepalive_s: Seconds for which an idle connection is kept.
    """

    def __init__(self, connections: int, *, keepalive_s: float) -> None:
        """Make the pools; none opens a connection before it is used."""
        # A pool sets no bound of its own: the turns do not know which one is free, and a request must not wait for one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_s)
        trust = httpx.create_ssl_context(trust_env=False)  # reading the certificates takes longer than all the rest
        count = max(1, -(-connections // LANE))
        self._pools = [httpx.AsyncHTTPTransport(verify=trust, limits=limits, trust_env=False) for _ in range(count)]
        self._turns = itertools.cycle(self._pools)

    @property
    def count(self) -> int:
        """Number of pools."""
        return len(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request through the next pool.

        Args:
            request: What to send.
        """
        return await next(self._turns).handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections of every pool."""
        for pool in self._pools:
            await pool.aclose()
