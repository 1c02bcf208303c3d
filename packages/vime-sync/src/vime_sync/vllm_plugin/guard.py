"""A torn engine answers with the reason, and nobody can make an engine go on by accident.

While an engine is torn its scheduler is paused, so a request would wait without a word, and ``/resume`` would let it
sample from a mix of versions. This middleware stands in front of the server and refuses both, until a whole version has
been committed. What only reads or halts (GET, ``/pause``, ``/abort_requests``, sleep) passes. ``/wake_up`` has to pass
too, because weights that are asleep cannot be sent again, but vLLM resumes the scheduler at its end; so the requests
that are frozen in a torn engine are aborted before it, and it is paused again after it.

While weights are being written, by a commit or in place by a trainer, ``/resume`` and ``/wake_up`` are refused: the
commit resumes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vime_sync.errors import AlreadyStartedError, SyncError, TornEngineError, to_wire

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

#: POST paths that a torn engine answers: they cannot make it generate.
ALLOWED = ("/vime/", "/pause", "/abort_requests", "/sleep", "/reset_", "/collective_rpc")
_WAKE = "/wake_up"
#: What makes a scheduler go on.
_RESUMES = ("/resume", _WAKE)


class ServeGuard:
    """ASGI middleware; costs two attribute look-ups a request."""

    def __init__(self, app: Any, state: Any) -> None:
        """Stand in front of `app`; the transaction is found in ``state.vime_sync``."""
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 503 (torn) or 409 (being written) with the named error."""
        server: Any = getattr(self._state, "vime_sync", None)
        torn, writing = getattr(server, "refusal", ""), getattr(server, "writing", "")
        if not (torn or writing) or scope.get("type") != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"])
        if writing and path.startswith(_RESUMES):
            await _refuse(send, 409, _being_written(path, writing))
        elif torn and path.startswith(_WAKE):
            await server.engine.pause("abort")
            await self._app(scope, receive, send)
            await server.engine.pause("keep")
        elif torn and not path.startswith(ALLOWED):
            await _refuse(send, 503, _torn(path, torn))
        else:
            await self._app(scope, receive, send)


def _being_written(path: str, writing: str) -> SyncError:
    return AlreadyStartedError(
        "the weights of this engine are being written",
        where=path,
        seen=writing,
        expected="nobody resumes it before the commit does",
        fix="wait for the commit, or abort it",
    )


def _torn(path: str, torn: str) -> SyncError:
    return TornEngineError(
        "this engine does not serve",
        where=path,
        seen=torn,
        fix="send a whole newer version; it resumes by itself after that",
    )


async def _refuse(send: Send, status: int, error: SyncError) -> None:
    body = json.dumps({"ok": False, **to_wire(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
