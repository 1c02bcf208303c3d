"""A torn engine answers with the reason, and nobody can make it go on by accident.

While an engine is torn its scheduler is paused, so a request would wait without a word, and ``/resume`` would let it
sample from a mix of versions. This middleware stands in front of the server and refuses both, until a whole version has
been committed. What only reads or halts (GET, ``/pause``, ``/abort_requests``, sleep and wake-up) passes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vime_sync.errors import TornEngineError, to_wire

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

#: POST paths that a torn engine answers: they cannot make it generate.
ALLOWED = ("/vime/", "/pause", "/abort_requests", "/sleep", "/wake_up", "/reset_", "/collective_rpc")


class ServeGuard:
    """ASGI middleware; costs one attribute look-up a request."""

    def __init__(self, app: Any, state: Any) -> None:
        """Stand in front of `app`; the transaction is found in ``state.vime_sync``, its verdict in ``refusal``."""
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 503 with the named error."""
        torn = getattr(getattr(self._state, "vime_sync", None), "refusal", "")
        if not torn or scope.get("type") != "http" or scope["method"] != "POST" or scope["path"].startswith(ALLOWED):
            await self._app(scope, receive, send)
            return
        error = TornEngineError(
            "this engine does not serve",
            where=str(scope["path"]),
            seen=torn,
            fix="send a whole newer version; it resumes by itself after that",
        )
        body = json.dumps({"ok": False, **to_wire(error)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
