"""The controller's side: one update, over any number of engines, as one transaction.

``update(v)`` first stages `v` on every engine (bytes there, verified, nothing served has changed). Only if all of them
did is any of them told to commit. If one refuses or does not answer in time, the update is aborted on all and every
engine serves what it served. With a single engine both halves travel in one request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from vime_sync.client import EngineClient
from vime_sync.digest import Digest
from vime_sync.engines import Engines
from vime_sync.errors import (
    DigestError,
    EngineError,
    NotStartedError,
    SyncError,
    TornEngineError,
    VersionConflictError,
)
from vime_sync.manifest import Manifest, check_manifest
from vime_sync.process import identity
from vime_sync.report import Served, SyncReport, Writing

#: After these nobody can say from here what the engine holds.
_UNCLEAR = (EngineError, TornEngineError)

InFlight = Literal["keep", "wait", "abort", "paused"]


class SyncSession:
    """Drives updates from one trainer to its engines. Use it from one thread.

    Example:
        >>> with SyncSession([url], publisher.manifest(), deadline_s=60) as session:   # doctest: +SKIP
        ...     publisher.stage(1)
        ...     report = session.update(1)
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        manifest: Manifest,
        *,
        deadline_s: float,
        mode: str = "auto",
        in_flight: InFlight = "keep",
        cast: bool = False,
        takeover: bool = False,
        copier: str = "auto",
        reload: bool = False,
    ) -> None:
        """Prepare a session; nothing is sent before `connect` (or the first `update`).

        Args:
            engine_urls: Base URLs of the vLLM servers.
            manifest: The merged manifest of all publishing ranks.
            deadline_s: Seconds that any one request may take.
            mode: ``"auto"``, ``"shadow"``, ``"undo"``, ``"direct"`` or ``"alias"``; see `vime_sync.receiver`.
            in_flight: What happens to requests that are being generated at a commit: ``"keep"`` (frozen, then go on
                with the new weights and a recomputed cache), ``"wait"`` (finished first), ``"abort"``, or ``"paused"``
                (the caller pauses the engines itself; a running one is refused).
            cast: Allow checkpoint dtypes that differ from the engines'.
            takeover: Replace another trainer's session.
            reload: Let the engines' own loaders fill what no copy can reach (vLLM's layerwise reload). Such a commit is
                slower and cannot be taken back: a failure in it leaves the engine torn.
            copier: ``"auto"``, ``"triton"`` or ``"torch"``; see `vime_sync.copying`.

        Raises:
            ManifestError: If the manifest is not whole.
            TransactionError: If no engine is named, or one twice.
        """
        check_manifest(manifest)
        self._manifest, self._deadline, self._mode = manifest, deadline_s, mode
        self._in_flight, self._cast, self._takeover, self._copier = in_flight, cast, takeover, copier
        self._reload = reload
        self._id = secrets.token_hex(8)
        self._engines = Engines(engine_urls, deadline_s)
        self._served = Served()

    @property
    def served(self) -> int:
        """The newest version that this session has brought engines to; -1 before the first."""
        return self._served.version

    @property
    def urls(self) -> list[str]:
        """The engines' base URLs, in order."""
        return self._engines.urls

    def connect(self) -> list[dict[str, Any]]:
        """Let every engine plan; idempotent.

        Returns:
            For each engine the summary of its plan: copies, bytes, fills, constants, ignored checkpoint tensors, what
            is reloaded, with the reasons, and why an engine that was started with ``weights="auto"`` is not aliased
            (``alias_refused``, else empty).

        Raises:
            SyncError: The first engine's refusal, by name.
        """
        replies = _raise_first(self._engines.ask(self._connect))
        return [dict(reply["plan"]) for reply in replies]

    def _connect(self, engine: EngineClient) -> dict[str, Any]:
        body = {
            "session": self._id,
            "owner": identity(),
            "manifest": self._manifest,
            "mode": self._mode,
            "cast": self._cast,
            "takeover": self._takeover,
            "copier": self._copier,
            "reload": self._reload,
            "deadline_s": self._deadline,
        }
        engine.known = True  # from here on it may hold this session
        reply = engine.call("connect", body)
        engine.version, engine.mode, engine.plan = int(reply["version"]), str(reply["mode"]), dict(reply["plan"])
        engine.connected = True
        return reply

    def update(self, version: int) -> SyncReport:
        """Bring every engine to `version`, which every publisher has staged.

        Args:
            version: Greater than any engine's.

        Returns:
            What was done.

        Raises:
            SyncError: By name. Engines serve what they served, except where the error says otherwise
                (`TornEngineError`, or an `EngineError` of the commit phase, which lists who has what).
        """
        started = time.perf_counter()
        if not self._engines.connected:
            self.connect()
        newest = max(engine.version for engine in self._engines)
        if version <= newest:
            raise VersionConflictError("the version is not newer", seen=str(version), expected=f"> {newest}")
        if len(self._engines) == 1:
            replies = [self._single(version)]
        else:
            staged = self._stage(version)
            committed = self._commit(version, staged)
            replies = [
                {**s, **c, "phases": {"stage": s["seconds"], **c["phases"]}}
                for s, c in zip(staged, committed, strict=True)
            ]
        for engine in self._engines:
            engine.version = version
        report = self._report(version, time.perf_counter() - started, replies, list(self._engines))
        self._served = Served.of(report)
        return report

    @contextmanager
    def writing(self, version: int) -> Iterator[Writing]:
        """A block in which the trainer writes weights that engines alias; `version` is committed at its end.

        Aliasing engines are paused before the block starts and resume after the commit. Other engines serve on, and are
        updated at the end, so a loop may use the block for both. Every publisher must have staged `version` when the
        block ends (`Publisher.writing` does).

        Args:
            version: Greater than any engine's.

        Yields:
            An object that holds the report once the block has ended.

        Raises:
            SyncError: By name. If the block fails before the first write the engines go on with what they served;
                after it, aliasing engines refuse to serve until a whole newer version is committed.
        """
        if not self._engines.connected:
            self.connect()
        aliased = [engine for engine in self._engines if engine.mode == "alias"]
        writing, done = Writing(), False
        try:
            opened = _raise_first(
                self._engines.ask(lambda e: e.call("open", self._body(e, version)) if e in aliased else {"phases": {}})
            )
            yield writing
            report = self.update(version)
            writing.report = replace(report, phases={**_slowest(opened), **report.phases})
            done = True
        finally:
            if not done and aliased:
                self.abort()  # of an engine that has committed it takes nothing back

    def _single(self, version: int) -> dict[str, Any]:
        """Both halves in one request."""
        try:
            return self._engines[0].call("update", self._body(self._engines[0], version))
        except (EngineError, NotStartedError):
            self._engines.unclear()  # it may have committed, or have been restarted
            raise

    def _body(self, engine: EngineClient, version: int) -> dict[str, Any]:
        return {
            "session": self._id,
            "version": version,
            "base": engine.version,
            "in_flight": self._in_flight,
            "deadline_s": self._deadline,
        }

    def _stage(self, version: int) -> list[dict[str, Any]]:
        results = self._engines.ask(lambda engine: engine.call("stage", self._body(engine, version)))
        if any(isinstance(result, SyncError) for result in results):
            if any(isinstance(result, (EngineError, NotStartedError)) for result in results):
                self._engines.unclear()
            self.abort()
        return _raise_first(results)

    def _commit(self, version: int, staged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        digest = {engine.url: reply.get("sum", "") for engine, reply in zip(self._engines, staged, strict=True)}
        results = self._engines.ask(
            lambda engine: engine.call("commit", {**self._body(engine, version), "digest": digest[engine.url]})
        )
        failed = [r for r in results if isinstance(r, SyncError)]
        if failed:
            held = {
                engine.url: str(result) if isinstance(result, SyncError) else f"version {version}"
                for engine, result in zip(self._engines, results, strict=True)
            }
            self._engines.unclear()
            self._note_committed(version, staged, results)
            self.abort()
            if len(failed) == len(results) and not any(isinstance(r, _UNCLEAR) for r in failed):
                raise failed[0]  # nobody wrote
            raise EngineError(
                "engines disagree after a commit",
                seen=str(held),
                expected=f"version {version} everywhere",
                fix="restart the engines that failed and `resync` them, or drop them; the others serve the new version",
            ) from failed[0]
        return [r for r in results if not isinstance(r, SyncError)]

    def _note_committed(
        self, version: int, staged: Sequence[Mapping[str, Any]], results: Sequence[dict[str, Any] | SyncError]
    ) -> None:
        """Remember what those that did commit serve: a restarted engine is brought there."""
        for engine, before, result in zip(self._engines, staged, results, strict=True):
            if not isinstance(result, SyncError):
                engine.version = version
                found = {**before, **result}
                self._served = Served(version, str(found.get("sum", "")), str(found.get("digest_mode", "off")))

    def abort(self) -> None:
        """Forget what is staged on any engine (best effort: an engine that does not answer aborts by its own rules)."""
        self._engines.ask(lambda engine: engine.call("abort", {"session": self._id, "deadline_s": self._deadline}))

    def _report(
        self, version: int, seconds: float, replies: Sequence[Mapping[str, Any]], engines: Sequence[EngineClient]
    ) -> SyncReport:
        return SyncReport(
            version=version,
            seconds=seconds,
            phases=_slowest(replies),
            bytes=sum(int(reply.get("bytes", 0)) for reply in replies),
            digest=str(replies[0].get("sum", "")),
            digest_mode=str(replies[0].get("digest_mode", "off")),
            mode=engines[0].mode,
            transport=str(self._manifest["transport"]),
            engines=len(replies),
            reload={k: v for engine in engines for k, v in engine.plan.get("reload", {}).items()},
        )

    def states(self) -> list[dict[str, Any]]:
        """What each engine says of itself: version, state, digest, torn, paused, label.

        Raises:
            SyncError: If an engine does not answer.
        """
        return _raise_first(self._engines.ask(lambda engine: engine.call("state")))

    def versions(self) -> list[int]:
        """The version that each engine serves, read from the engines; -1 before the first commit."""
        return [int(state["version"]) for state in self.states()]

    def close(self) -> None:
        """Let the engines go; they keep serving what they have."""
        self._engines.close(self._id)

    # -- engines that come and go -------------------------------------------------------------------------------------

    def add(self, url: str) -> None:
        """Take one more engine in. The next `update` connects it and brings it along; `resync` does so at once.

        Args:
            url: Base URL of the vLLM server.

        Raises:
            TransactionError: If the session has it already.
        """
        self._engines.add(url)

    def remove(self, url: str) -> None:
        """Let one engine go, dead or alive; it keeps serving what it has and is updated no more.

        Args:
            url: As it was given.

        Raises:
            TransactionError: If the session does not have it, or has no other.
        """
        self._engines.remove(url, self._id)

    def replace(self, old_url: str, new_url: str) -> None:
        """Put one engine in the place of another, which may be dead, or be the same address started again.

        Nothing is sent to the new one yet: `resync` or the next `update` does.

        Args:
            old_url: An engine of the session.
            new_url: The engine that takes its place.

        Raises:
            TransactionError: If the session does not have the old one, or has the new one already.
        """
        self._engines.replace(old_url, new_url, self._id)

    def resync(self, url: str) -> SyncReport:
        """Bring one engine, and only that one, to the version that the session serves: after a restart, say.

        The others go on serving. The trainer's buffers must still hold that version as it was staged, which is checked
        before anything is written: the publisher's version, and its digest against the one that was served. Do it
        between an update and the next writing of weights. If a newer version is staged already, `update` to that one
        instead: it takes every engine along, wherever it stands.

        Args:
            url: An engine of the session.

        Returns:
            What was done; no bytes where the engine had the version, which is then proved by its live bytes.

        Raises:
            NotStartedError: If the session has served nothing yet.
            StaleSourceError: If the publishers hold another version, or are writing.
            DigestError: If they hold other bytes for this version, or the engine does.
            SyncError: By name, what else the engine refused.
        """
        started, engine, served = time.perf_counter(), self._engines.find(url), self._served
        if served.version < 0:
            raise NotStartedError("no version is served yet", where=engine.url, fix="call update()")
        state = self._connect(engine)
        if state["torn"] and engine.version == served.version:
            raise TornEngineError(
                "an engine's bytes of this version are a mix",
                where=engine.url,
                seen=str(state["torn"]),
                fix="update() to a newer version, which sends all of them",
            )
        body = {**self._body(engine, served.version), "expect": served.digest}
        try:
            reply = self._standing(engine) if engine.version == served.version else engine.call("update", body)
        except (EngineError, NotStartedError):
            engine.connected = False
            raise
        engine.version = served.version
        return self._report(served.version, time.perf_counter() - started, [reply], [engine])

    def _standing(self, engine: EngineClient) -> dict[str, Any]:
        """Prove that an engine which says that it has the version has its bytes; a report without any moved."""
        found: dict[str, Any] = {"phases": {}, "digest_mode": self._served.mode, "sum": self._served.digest}
        if self._served.mode != "full":
            return found
        described = [{key: tensor[key] for key in ("name", "dtype", "shape")} for tensor in self._manifest["tensors"]]
        reply = engine.call("verify", {"tensors": described, "deadline_s": self._deadline})
        live = str(sum((Digest.parse(text) for text in reply["digests"].values()), Digest()))
        if live != self._served.digest:
            raise DigestError(
                "an engine holds other bytes for this version than those that were served",
                where=engine.url,
                seen=live,
                expected=self._served.digest,
                fix="send it a newer version",
            )
        return found

    def __enter__(self) -> SyncSession:
        """Connect; a session that cannot lets go of the engines that it did reach."""
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _slowest(replies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase, of the engine that took longest in it."""
    names = dict.fromkeys(name for reply in replies for name in reply["phases"])
    return {name: max(reply["phases"].get(name, 0.0) for reply in replies) for name in names}


def _raise_first(results: Sequence[dict[str, Any] | SyncError]) -> list[dict[str, Any]]:
    for result in results:
        if isinstance(result, SyncError):
            raise result
    return [result for result in results if not isinstance(result, SyncError)]
