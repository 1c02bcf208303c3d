"""HTTP routes under ``/vime``: one engine's half of the transaction, run inside its API server.

The server, not the client, holds the order *pause, commit on every worker, drop caches, publish the version, resume*.
So a controller that dies in the middle leaves an engine that has either finished the step or undone it, and a whole
update costs one round trip; a block in which a trainer writes aliased weights costs two, ``open`` and ``update``.

=============  ===========================================================================================
``state``      what the engine serves (GET)
``connect``    plan on every worker; divide the digest among them
``open``       pause, so that a trainer may write the weights that this engine aliases
``stage``      bytes ready on every worker, verified; nothing that is served has changed
``commit``     pause (which drops caches), write, publish the version, resume
``update``     ``stage`` and ``commit`` in one call
``abort``      forget what was staged
``disconnect`` let go of the trainer
``verify``     digests of the bytes that are live now
=============  ===========================================================================================

Every answer is JSON with ``ok``; a refusal has status 409 and carries the named error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from vime_sync.agree import divide
from vime_sync.digest import Digest
from vime_sync.errors import (
    AlreadyStartedError,
    DigestError,
    EngineError,
    NotPausedError,
    SyncError,
    TornEngineError,
    TransactionError,
    from_wire,
    to_wire,
)
from vime_sync.messages import integer, seconds
from vime_sync.verify import join_digests
from vime_sync.vllm_plugin.control import EngineControl
from vime_sync.vllm_plugin.guard import ServeGuard
from vime_sync.vllm_plugin.watch import watch_trainers
from vime_sync.vllm_plugin.window import check_client

logger = logging.getLogger(__name__)

PAUSE_MODES = ("keep", "wait", "abort")
#: Seconds that workers get for the small messages: state, abort, rollback.
_PATIENCE_S = 10.0


class SyncServer:
    """The transaction of one engine. One operation at a time; a second one is refused, not queued."""

    def __init__(self, engine: EngineControl) -> None:
        """Drive `engine`."""
        self.engine = engine
        #: Why the engine may not serve, or empty, as of the last finished operation; `ServeGuard` reads it.
        self.refusal = ""
        self.torn = ""
        #: Who opened aliased weights for writing, and in which session.
        self.opened_by: Any = None
        self.session = ""
        self._owner: Any = None
        self._condemned = ""
        #: Why nobody may resume the engine now, or empty; `ServeGuard` reads it.
        self.writing = ""
        self._busy = ""
        self._held = False
        self._paused_at = 0.0

    async def handle(self, operation: str, body: Any) -> dict[str, Any]:
        """Run one operation.

        Args:
            operation: One of the table in the module's text.
            body: The request's JSON.

        Returns:
            The answer, ``ok`` included.
        """
        started = time.perf_counter()
        try:
            if not isinstance(body, dict):
                raise TransactionError("malformed request", seen=type(body).__name__, expected="a JSON object")
            if self._busy:
                raise AlreadyStartedError(
                    "an operation is under way", seen=self._busy, expected=f"idle for {operation}"
                )
            self._busy = operation
            try:
                deadline = seconds(body, "deadline_s", 60.0)
                async with asyncio.timeout(deadline):
                    answer = await self._run(operation, body, deadline)
            finally:
                self._busy, self.refusal = "", self.torn
            reply = {"ok": True, **answer}
        except SyncError as error:
            reply = {"ok": False, **to_wire(error)}
        except TimeoutError:
            late = EngineError(
                "the engine did not finish in time", where=operation, expected=f"{body.get('deadline_s', 60.0)} s"
            )
            reply = {"ok": False, **to_wire(late)}
        return {**reply, "server_seconds": time.perf_counter() - started}

    async def _run(self, operation: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        if operation == "state":
            return await self._state()
        if operation == "connect":
            return await self._connect(body, deadline)
        if operation == "stage":
            return await self._stage(body, deadline)
        if operation == "commit":
            return await self._commit(body, deadline)
        if operation == "update":
            return await self._update(body, deadline)
        if operation == "verify":
            replies = await self._ask("verify", body, deadline)
            return {**self._one(replies), "digests": join_digests(replies)}
        if operation == "open":
            return await self._open(body, deadline)
        if operation == "abort":
            return self._one(await self._abort(body))
        return self._one(await self._ask(operation, body, deadline))

    async def _ask(self, operation: str, body: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Ask every worker; raise the first refusal."""
        replies = await self.engine.workers({**body, "op": operation}, deadline)
        self._judge(replies, operation)
        for reply in replies:
            if not reply.get("ok"):
                raise from_wire(reply)
        return replies

    def _judge(self, replies: list[dict[str, Any]], operation: str) -> None:
        torn = next((r["torn"] for r in replies if r.get("torn")), "")
        self.torn = self._condemned or torn or self._split(operation, replies)

    async def condemn(self, reason: str) -> None:
        """Never serve again: what the weights are made of is gone.

        Args:
            reason: What every request is told.
        """
        self._condemned = self.torn = self.refusal = reason
        await self.engine.pause("abort")

    @staticmethod
    def _split(operation: str, replies: list[dict[str, Any]]) -> str:
        """Workers that hold different versions, outside the steps in which they change."""
        versions = sorted({reply["version"] for reply in replies})
        return f"workers hold versions {versions}" if len(versions) > 1 and operation != "confirm" else ""

    def _one(self, replies: list[dict[str, Any]]) -> dict[str, Any]:
        versions = sorted({reply["version"] for reply in replies})
        return {
            "version": versions[0] if len(versions) == 1 else -1,
            "state": "torn" if self.torn else replies[0]["state"],
            "torn": self.torn,
            "digest": replies[0]["digest"],
            "workers": len(replies),
        }

    async def _state(self) -> dict[str, Any]:
        replies = await self._ask("state", {}, _PATIENCE_S)
        return {**self._one(replies), "paused": await self.engine.is_paused(), "label": await self.engine.label()}

    async def _connect(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        replies = await self._ask("connect", body, deadline)
        self._owner, self.session = body.get("owner"), str(body.get("session"))
        await self._end_block()
        if replies[0]["mode"] == "alias" and replies[0]["version"] >= 0:
            await self.engine.publish(str(replies[0]["version"]))
        if len(replies) > 1:
            shares = divide({r["rank"]: [tuple(item) for item in r["slices"]] for r in replies})
            await self._ask("agree", {"session": body.get("session"), "shares": shares}, deadline)
        ignored = set.intersection(*(set(r["plan"]["ignored"]) for r in replies))
        reload = {name: why for r in replies for name, why in r["plan"]["reload"].items()}
        refused = next((r["plan"]["alias_refused"] for r in replies if r["plan"]["alias_refused"]), "")
        plan = {key: sum(r["plan"][key] for r in replies) for key in ("copies", "bytes", "fills", "constants")}
        return {
            **self._one(replies),
            "mode": replies[0]["mode"],
            "copier": replies[0]["copier"],
            "seconds": max(r["seconds"] for r in replies),
            "plan": {**plan, "ignored": sorted(ignored), "reload": reload, "alias_refused": refused},
        }

    async def _stage(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        keep = False
        try:
            replies = await self._ask("stage", body, deadline)
            reply = {**self._one(replies), **_verified(replies), "seconds": max(r["seconds"] for r in replies)}
            keep = True
        except AlreadyStartedError:
            keep = True  # what is staged is another update's
            raise
        finally:
            if not keep:
                await self._abort(body)
        return reply

    async def _abort(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Drop what is staged; an engine whose workers do not answer has nothing that could be committed either."""
        replies: list[dict[str, Any]] = []
        try:
            replies = await self.engine.workers({"op": "abort", "session": body.get("session")}, _PATIENCE_S)
            self._judge(replies, "abort")
        except EngineError as error:
            logger.warning("vime-sync: an abort was not answered: %s", error)
        if replies:
            await self._end_block()
        return replies

    async def _end_block(self) -> None:
        """No trainer writes aliased weights any more; go on, if what is there is whole."""
        if self.opened_by is None:
            return
        self.opened_by, self.writing = None, ""
        await self._let_go()

    async def _open(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Pause, so that the trainer may write what this engine aliases; the commit resumes."""
        phases: dict[str, float] = {}
        self._paused_at = time.perf_counter()
        resume = await self._pause(body.get("in_flight", "keep"), phases)
        done = False
        try:
            with _timed(phases, "open"):
                replies = await self._ask("open", body, deadline)
            done = True
        finally:
            if not done and resume and not self.torn:
                await self.engine.resume()
        self.opened_by, self._held = self._owner or {}, resume
        self.writing = f"a trainer writes version {body.get('version')} into the weights"
        return {**self._one(replies), "phases": phases}

    async def _commit(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        phases: dict[str, float] = {}
        version, opened = integer(body, "version"), self.opened_by is not None
        paused = self._paused_at if opened else time.perf_counter()
        resume = self._held if opened else await self._pause(body.get("in_flight", "keep"), phases)
        self.writing = f"version {version} is being committed"
        try:
            with _timed(phases, "commit"):
                replies, verified = await (self._write_opened if opened else self._write)(body, deadline)
            with _timed(phases, "publish"):
                await self.engine.publish(str(version))
        except BaseException as error:
            if await self._rollback(body, error) and isinstance(error, DigestError):
                raise TornEngineError(
                    "the bytes that were written are not those that were published",
                    seen=str(error),
                    fix="send a whole newer version",
                ) from error
            raise
        finally:
            # After a failed write the engine stays paused: nothing half new is ever sampled from.
            self._held, self.opened_by, self.writing = bool(self.torn) and resume, None, ""
            if resume and not self.torn:
                with _timed(phases, "resume"):
                    await self.engine.resume()
        if resume:
            phases["paused"] = time.perf_counter() - paused
        if "copy_seconds" in verified:
            phases["copy"] = verified["copy_seconds"]
        return {**self._one(replies), **verified, "phases": phases}

    async def _write_opened(self, body: dict[str, Any], deadline: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Commit what the trainer wrote in place, and see that the engine was paused all the while."""
        paused = asyncio.create_task(self.engine.is_paused())  # on its way while the workers work
        try:
            written = await self._write(body, deadline)
        finally:
            still = await paused
        if not still:
            await self.engine.pause("keep")
            raise NotPausedError(
                "the engine was resumed while the trainer wrote its weights",
                seen="running",
                expected="paused from open to commit",
                fix="let only the commit resume it; send a whole newer version",
            )
        return written

    async def _write(self, body: dict[str, Any], deadline: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Commit on every worker; several have to agree before any of them calls it done."""
        replies = await self._ask("commit", body, deadline)
        verified = _verified(replies)
        if len(replies) > 1:
            digest = verified.get("sum") or body.get("digest", "")
            replies = await self._ask("confirm", {**body, "digest": digest}, deadline)
        return replies, verified

    async def _rollback(self, body: dict[str, Any], error: BaseException) -> str:
        """Take back what can be taken back; why the engine is torn, or empty. An unclear answer counts as torn."""
        message = {"op": "rollback", "session": body.get("session"), "version": body.get("version")}
        reason = f"{type(error).__name__}: {error}"
        try:
            replies = await self.engine.workers({**message, "reason": reason}, _PATIENCE_S)
        except SyncError as lost:
            self.torn = f"after {reason}, nobody knows what the workers hold: {lost}"
            return self.torn
        self.torn = next((r["torn"] for r in replies if r["torn"]), "")
        if not self.torn and len({r["version"] for r in replies}) > 1:
            self.torn = f"after {reason}, workers hold versions {sorted({r['version'] for r in replies})}"
        return self.torn

    async def _pause(self, mode: Any, phases: dict[str, float]) -> bool:
        """Pause, caches dropped; whether to resume after a success.

        An engine that somebody paused before is paused once more: theirs may still be draining, and only a pause that
        has returned means that no step runs. It stays paused afterwards, for them to resume.
        """
        before = await self.engine.is_paused()
        if not before and mode not in PAUSE_MODES:
            raise NotPausedError(
                "the engine is generating",
                seen=f"in_flight={mode!r}",
                expected=f"a paused engine, or in_flight one of {PAUSE_MODES}",
            )
        resume = self._held or not before
        try:
            with _timed(phases, "pause"):
                await self.engine.pause("keep" if before else mode)
        except BaseException:
            # Cut off by the deadline, say: the scheduler is paused all the same, or will be, and nobody else resumes it
            self._held = resume
            await self._let_go()
            raise
        return resume

    async def _let_go(self) -> None:
        """Resume what was paused here; if the scheduler does not answer, the next commit does it."""
        if self._held and not self.torn:
            async with asyncio.timeout(_PATIENCE_S):
                await self.engine.resume()
            self._held = False

    async def _update(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        done = False
        try:
            if self.opened_by is not None:  # nothing moves, so there is nothing to stage ahead of the pause
                committed = await self._commit({**body, "stage": True}, deadline)
            else:
                staged = await self._stage(body, deadline)
                committed = await self._commit({**body, "digest": staged.get("sum", "")}, deadline)
                committed = {**staged, **committed, "phases": {"stage": staged["seconds"], **committed["phases"]}}
            done = True
        except AlreadyStartedError:
            done = True  # what is staged is another update's
            raise
        finally:
            if not done:
                await self._abort(body)
        return committed


class _timed:  # noqa: N801 (reads as a statement)
    """Adds the time of a block to a dict."""

    def __init__(self, phases: dict[str, float], name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._phases[self._name] = time.perf_counter() - self._started


def _verified(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what the workers counted and compare it with what was published."""
    report: dict[str, Any] = {}
    if any("bytes" in r for r in replies):
        report["bytes"] = sum(r.get("bytes", 0) for r in replies)
    if "sum" in replies[0]:
        total = sum((Digest.parse(r["sum"]) for r in replies), Digest())
        if str(total) != replies[0]["expected"]:
            raise DigestError(
                "bytes that arrived are not those that were published",
                where="all workers",
                seen=str(total),
                expected=replies[0]["expected"],
            )
        report["sum"] = str(total)
    if "digest_mode" in replies[0]:
        report["digest_mode"] = replies[0]["digest_mode"]
        report["copy_seconds"] = max(r["copy_seconds"] for r in replies)
    return report


async def _read(raw: Request) -> Any:
    """The request's JSON; None where it is none, which `SyncServer.handle` refuses by name."""
    try:
        return await raw.json()
    except ValueError:
        return None


class SyncEndpoints:
    """The endpoint plugin: see `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "vime_sync"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        router = APIRouter(prefix="/vime")

        async def call(operation: str, raw: Request) -> JSONResponse:
            body = await _read(raw) if raw.method == "POST" else {}
            reply = await raw.app.state.vime_sync.handle(operation, body)
            return JSONResponse(reply, status_code=200 if reply["ok"] else 409)

        def route(operation: str, method: str) -> None:
            async def endpoint(raw: Request) -> JSONResponse:
                return await call(operation, raw)

            router.add_api_route(f"/{operation}", endpoint, methods=[method], name=f"vime_{operation}")

        route("state", "GET")
        for operation in ("connect", "open", "stage", "commit", "update", "abort", "disconnect", "verify"):
            route(operation, "POST")
        app.include_router(router)
        app.add_middleware(ServeGuard, state=app.state)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the engine's client for the routes.

        Raises:
            WindowError: If it cannot do what a transaction needs.
        """
        if engine_client is not None:
            check_client(engine_client)
        state.vime_sync = SyncServer(EngineControl(engine_client))
        if engine_client is not None:
            state.vime_sync_watch = asyncio.create_task(watch_trainers(state.vime_sync))
