"""The controller's side: one update, over any number of engines, as one transaction.

``update(v)`` first stages `v` on every engine (bytes there, verified, nothing served has changed). Only if all of them
did is any of them told to commit. If one refuses or does not answer in time, the update is aborted on all and every
engine serves what it served. With a single engine both halves travel in one request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal

from vime_sync.client import EngineClient
from vime_sync.errors import (
    EngineError,
    NotStartedError,
    SyncError,
    TornEngineError,
    TransactionError,
    VersionConflictError,
)
from vime_sync.manifest import Manifest, check_manifest
from vime_sync.process import identity

#: After these nobody can say from here what the engine holds.
_UNCLEAR = (EngineError, TornEngineError)

InFlight = Literal["keep", "wait", "abort", "paused"]


@dataclass(frozen=True)
class SyncReport:
    """What one update did.

    Attributes:
        version: The version that every engine serves now.
        seconds: Wall time of the whole call.
        phases: Seconds by phase, the slowest engine's: ``stage``, ``pause``, ``commit``, ``resume``.
        bytes: Bytes copied, over all engines.
        digest: The digest of what the engines serve (32 hexadecimal digits), empty if digests are off.
        digest_mode: ``off``, ``sampled`` or ``full``.
        mode: ``shadow``, ``undo``, ``direct`` or ``alias``.
        transport: The manifest's transport.
        engines: How many engines were updated.
        reload: Live tensors that were not copied but loaded again by the engine's own means, each with the reason.
    """

    version: int
    seconds: float
    phases: Mapping[str, float]
    bytes: int
    digest: str
    digest_mode: str
    mode: str
    transport: str
    engines: int
    reload: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


@dataclass
class Writing:
    """What `SyncSession.writing` yields.

    Attributes:
        report: The update's report; None until the block has ended.
    """

    report: SyncReport | None = None


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
        if not engine_urls or len(set(engine_urls)) != len(engine_urls):
            raise TransactionError("give each engine once", seen=str(list(engine_urls)))
        self._manifest, self._deadline, self._mode = manifest, deadline_s, mode
        self._in_flight, self._cast, self._takeover, self._copier = in_flight, cast, takeover, copier
        self._reload = reload
        self._id = secrets.token_hex(8)
        self._engines = [EngineClient(url, deadline_s) for url in engine_urls]
        self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="vime-sync")
        self._connected = self._known = False

    def _all(self, call: Callable[[EngineClient], dict[str, Any]]) -> list[dict[str, Any] | SyncError]:
        """Call every engine at once; an engine's failure is its result."""

        def one(engine: EngineClient) -> dict[str, Any] | SyncError:
            try:
                return call(engine)
            except SyncError as error:
                return error

        return list(self._pool.map(one, self._engines))

    def connect(self) -> list[dict[str, Any]]:
        """Let every engine plan; idempotent.

        Returns:
            For each engine the summary of its plan: copies, bytes, fills, constants, ignored checkpoint tensors, and
            what is reloaded, with the reasons.

        Raises:
            SyncError: The first engine's refusal, by name.
        """
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
        self._known = True  # from here on an engine may hold this session
        replies = _raise_first(self._all(lambda engine: engine.call("connect", body)))
        for engine, reply in zip(self._engines, replies, strict=True):
            engine.version, engine.mode, engine.plan = int(reply["version"]), str(reply["mode"]), dict(reply["plan"])
        self._connected = True
        return [engine.plan for engine in self._engines]

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
        if not self._connected:
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
        return self._report(version, time.perf_counter() - started, replies)

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
        if not self._connected:
            self.connect()
        aliased = [engine for engine in self._engines if engine.mode == "alias"]
        writing, done = Writing(), False
        try:
            _raise_first(self._all(lambda e: e.call("open", self._body(e, version)) if e in aliased else {}))
            yield writing
            done = True
        finally:
            if not done and aliased:
                self.abort()
        writing.report = self.update(version)

    def _single(self, version: int) -> dict[str, Any]:
        """Both halves in one request."""
        try:
            return self._engines[0].call("update", self._body(self._engines[0], version))
        except (EngineError, NotStartedError):
            self._connected = False  # it may have committed, or have been restarted: ask before the next update
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
        results = self._all(lambda engine: engine.call("stage", self._body(engine, version)))
        if any(isinstance(result, SyncError) for result in results):
            self._connected = not any(isinstance(result, (EngineError, NotStartedError)) for result in results)
            self.abort()
        return _raise_first(results)

    def _commit(self, version: int, staged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        digest = {engine.url: reply.get("sum", "") for engine, reply in zip(self._engines, staged, strict=True)}
        results = self._all(
            lambda engine: engine.call("commit", {**self._body(engine, version), "digest": digest[engine.url]})
        )
        failed = [r for r in results if isinstance(r, SyncError)]
        if failed:
            held = {
                engine.url: str(result) if isinstance(result, SyncError) else f"version {version}"
                for engine, result in zip(self._engines, results, strict=True)
            }
            self._connected = False
            self.abort()
            if len(failed) == len(results) and not any(isinstance(r, _UNCLEAR) for r in failed):
                raise failed[0]  # nobody wrote
            raise EngineError(
                "engines disagree after a commit",
                seen=str(held),
                expected=f"version {version} everywhere",
                fix="restart or drop the engines that failed; the others serve the new version",
            ) from failed[0]
        return [r for r in results if not isinstance(r, SyncError)]

    def abort(self) -> None:
        """Forget what is staged on any engine (best effort: an engine that does not answer aborts by its own rules)."""
        self._all(lambda engine: engine.call("abort", {"session": self._id, "deadline_s": self._deadline}))

    def _report(self, version: int, seconds: float, replies: Sequence[Mapping[str, Any]]) -> SyncReport:
        names = list(dict.fromkeys(name for reply in replies for name in reply["phases"]))
        return SyncReport(
            version=version,
            seconds=seconds,
            phases={name: max(reply["phases"].get(name, 0.0) for reply in replies) for name in names},
            bytes=sum(int(reply.get("bytes", 0)) for reply in replies),
            digest=str(replies[0].get("sum", "")),
            digest_mode=str(replies[0].get("digest_mode", "off")),
            mode=self._engines[0].mode,
            transport=str(self._manifest["transport"]),
            engines=len(replies),
            reload={k: v for engine in self._engines for k, v in engine.plan.get("reload", {}).items()},
        )

    def states(self) -> list[dict[str, Any]]:
        """What each engine says of itself: version, state, digest, torn, paused, label.

        Raises:
            SyncError: If an engine does not answer.
        """
        return _raise_first(self._all(lambda engine: engine.call("state")))

    def versions(self) -> list[int]:
        """The version that each engine serves, read from the engines; -1 before the first commit."""
        return [int(state["version"]) for state in self.states()]

    def close(self) -> None:
        """Let the engines go; they keep serving what they have."""
        if self._known:
            self._all(lambda engine: engine.call("disconnect", {"session": self._id}))
            self._connected = self._known = False
        for engine in self._engines:
            engine.close()
        self._pool.shutdown()

    def __enter__(self) -> SyncSession:
        """Connect."""
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _raise_first(results: Sequence[dict[str, Any] | SyncError]) -> list[dict[str, Any]]:
    for result in results:
        if isinstance(result, SyncError):
            raise result
    return [result for result in results if not isinstance(result, SyncError)]
