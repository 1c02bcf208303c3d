"""One engine as its controller sees it: JSON over HTTP, and every refusal as the error that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from vime_sync.errors import EngineError, NotStartedError, from_wire


class EngineClient:
    """One engine's address and connection pool, and what its last answers said.

    Attributes:
        url: Base URL of the server.
        version: The version that it is known to serve, -1 before the first commit.
        mode: How it writes.
        plan: The summary of its plan.
        connected: Whether it holds this session, as far as anybody here knows.
        known: Whether it was ever asked to.
    """

    def __init__(self, url: str, deadline_s: float) -> None:
        """Talk to `url`; every request has the deadline."""
        self.url = url.rstrip("/")
        self.version = -1
        self.mode = ""
        self.plan: dict[str, Any] = {}
        self.connected = self.known = False
        # An engine is an address of the cluster: a proxy for the world outside has no business between.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(deadline_s, connect=min(deadline_s, 10.0)),
            trust_env=False,
        )

    def call(self, operation: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request under ``/vime``.

        Args:
            operation: The route's name.
            body: The JSON of a POST; None makes it a GET.

        Returns:
            The answer.

        Raises:
            NotStartedError: After `close`.
            EngineError: If the server does not answer in time, or is not ours.
            SyncError: What the engine refused, as the class it named.
        """
        if self._http.is_closed:
            raise NotStartedError("this session let the engine go", where=self.url, fix="make a new session")
        try:
            if body is None:
                response = self._http.get(f"/vime/{operation}")
            else:
                response = self._http.post(f"/vime/{operation}", json=body)
        except httpx.TimeoutException as cause:
            raise EngineError(
                "an engine did not answer in time", where=f"{self.url} {operation}", seen=type(cause).__name__
            ) from cause
        except httpx.HTTPError as cause:
            raise EngineError(
                "an engine cannot be reached", where=f"{self.url} {operation}", seen=str(cause)
            ) from cause
        if response.status_code in (404, 405):
            raise EngineError(
                "this server has no vime routes",
                where=self.url,
                seen=f"HTTP {response.status_code}",
                fix="start vLLM with engine_arguments() and engine_environment()",
            )
        try:
            reply = response.json()
        except ValueError as cause:
            raise EngineError(
                "an engine's answer is not JSON",
                where=f"{self.url} {operation}",
                seen=f"HTTP {response.status_code}: {response.text[:120]}",
            ) from cause
        if not isinstance(reply, dict) or "ok" not in reply:
            raise EngineError("an engine's answer is not ours", where=f"{self.url} {operation}", seen=str(reply)[:120])
        if not reply["ok"]:
            raise from_wire(reply, where=self.url)
        return reply

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
