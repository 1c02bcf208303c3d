"""An engine that somebody runs: states, versions and generation over HTTP, without owning a process.

Use it for engines that other processes or other people started; they are never killed from here. ``VLLMEngine`` adds
the process.

Coming back. A server that died or hangs is started again by whoever owns it, perhaps at another address; ``reconnect``
points the engine there. Requests that were in flight are sent again, whole, with their own seeds: the old server can
no longer answer, so no sample is made twice, and a response never holds tokens of two servers. A request with a
version is checked against the version of the server that is there now. ``give_up`` declares the server lost without
waiting for deadlines: what is in flight ends at once, for a pool to send elsewhere.

Versions. The engine itself stamps every token with the version label of the weights that sampled it. Here the labels
are integers; a fresh server's label (``"default"``) is replaced when the engine is connected. Every answer is checked
against the version it was asked from, so a rollout can never hand on tokens of weights that it did not mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from vime_rollout.engine.client import EngineClient
from vime_rollout.engine.request import GenerateRequest, Generation, SamplingParams
from vime_rollout.engine.state import EngineState, StateMachine
from vime_rollout.engine.window import Dialect, dialect_of
from vime_rollout.errors import (
    EngineBusyError,
    EngineDeadError,
    EngineError,
    EngineResponseError,
    EngineTimeoutError,
    VersionMismatchError,
)
from vime_rollout.sample import VersionSpan

PauseMode = Literal["abort", "wait", "keep"]
#: Version of weights that belong to no version of a run: a restarted server has it until weights are sent to it.
UNSENT_VERSION = -1
_UNLABELLED = "default"
#: What the generate route puts before the id of a request.
_REQUEST_PREFIX = "generate-tokens-"


class Engine(Protocol):
    """What rollouts and pools ask of an engine."""

    name: str

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        ...

    @property
    def in_flight(self) -> int:
        """Samples that wait or run."""
        ...

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Generate one response, checked against ``version``."""
        ...

    async def generate_many(
        self, request: GenerateRequest, count: int, *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Generate several responses, the i-th being what ``request.alone(i)`` makes."""
        ...

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Cut these running requests; each comes back with the tokens it has, as ``aborted``."""
        ...


class RemoteEngine:
    """One vLLM server reached by its address.

    Args:
        url: Such as ``http://127.0.0.1:8000``.
        name: Name in logs and errors; the address when empty.
        client: A client with settings of its own; by default one with default settings.
    """

    def __init__(self, url: str, *, name: str = "", client: EngineClient | None = None) -> None:
        """Keep the address; ``connect`` makes the first call."""
        self.name = name or url
        self._client = client or EngineClient(url, name=self.name)
        self._states = StateMachine(self.name)
        self._version: int | None = None
        self._asleep_before_update = False
        self._about_to_ask = 0

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._states.state

    @property
    def version(self) -> int | None:
        """Version of the weights, as last read from or given to the engine; ``None`` before it is connected."""
        return self._version

    @property
    def dialect(self) -> Dialect:
        """What the server's release of vLLM does; the newest one's before it is connected."""
        return self._client.dialect

    @property
    def in_flight(self) -> int:
        """Samples that wait or run."""
        return self._client.in_flight + self._about_to_ask

    async def connect(self, initial_version: int = 0) -> None:
        """Check that the server answers, read its weight version, and become ready.

        Args:
            initial_version: Label for the weights of a server that has none yet.

        Raises:
            EngineError: When the server does not answer as a vLLM server with the RL and scale-out routes does.
        """
        self._states.move(EngineState.STARTING)
        await self._greet(initial_version)
        self._states.move(EngineState.READY)

    async def reconnect(self, url: str | None = None, *, version: int | None = None) -> None:
        """Take a server that was started again, from any state; requests wait meanwhile and then go to it.

        Args:
            url: Its address; ``None``: the one before.
            version: What its weights must be; ``None`` takes what they are (``UNSENT_VERSION`` where it has no label).

        Raises:
            VersionMismatchError: When its weights are others; the engine is torn then.
            EngineError: When it does not answer; the engine is dead then, and ``reconnect`` may be tried again.
        """
        self._states.restart()
        try:
            await self._client.move(url or self._client.url)
            await self._greet(UNSENT_VERSION)
        except BaseException as error:
            if self.state is EngineState.STARTING:
                self._states.move(EngineState.DEAD, f"no answer at {self.url} when reconnecting: {error}")
            raise
        if version is not None and self._version != version:
            self._states.move(EngineState.TORN, f"version {self._version} after a restart, expected {version}")
            raise VersionMismatchError(
                "restarted engine has other weights than asked for",
                where=f"engine {self.name} at {self.url}",
                seen=f"version {self._version}",
                expected=f"version {version}",
                fix="send it the weights of that version, then reconnect again",
            )
        self._states.move(EngineState.READY)

    async def give_up(self, reason: str) -> None:
        """Take the server for dead: what is in flight ends at once, and everything is refused until it is replaced.

        Args:
            reason: Why; told in the errors.
        """
        if self.state not in (EngineState.DEAD, EngineState.STOPPED):
            self._states.move(EngineState.DEAD, reason)
        await self._client.cut()

    async def _greet(self, initial_version: int) -> None:
        await self._client.control("GET", "/health")
        release = str((await self._client.control("GET", "/version"))["version"])
        if release != self._client.dialect.release:
            self._client.dialect = dialect_of(release, where=f"engine {self.name} at {self.url}")
        info = await self._client.control("GET", "/weight_info")
        if info["weight_version"] == _UNLABELLED:
            await self._client.control("POST", "/update_weight_version", json={"new_version": str(initial_version)})
        await self.read_version()

    async def read_version(self, *, deadline_s: float | None = None) -> int:
        """Ask the engine for the version of its weights and return it.

        Args:
            deadline_s: Seconds, where they are fewer than the control deadline's.

        Raises:
            EngineResponseError: When the label is no integer.
        """
        try:
            info = await self._client.read("/weight_info", deadline_s=deadline_s)
        except (EngineBusyError, EngineTimeoutError) as error:
            raise await self._diagnose(error) from error
        try:
            self._version = int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineResponseError(
                "engine's weight version is no integer", where=f"engine {self.name}", seen=str(info)
            ) from error
        return self._version

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Generate one response; see ``generate_many``."""
        (generation,) = await self.generate_many(request, 1, version=version, deadline_s=deadline_s)
        return generation

    async def generate_many(
        self, request: GenerateRequest, count: int, *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Generate several responses; wait while the engine is paused or updating.

        Args:
            request: What to generate.
            count: How many; the i-th is what ``request.alone(i)`` makes.
            version: Weights that every token must come from; ``None`` takes any and records them.
            deadline_s: Seconds to become ready, and then to answer; ``None`` takes the configured deadline. Both begin
                anew when the server is replaced meanwhile.

        Raises:
            VersionMismatchError: When the engine has, or a token came from, another version.
            EngineDeadError: When the engine died; with the tail of its log where this process owns it.
            EngineError: See ``EngineClient.generate`` and ``StateMachine.until_ready``.
        """
        generations: tuple[Generation, ...] | None = None
        while generations is None:
            await self._ready_at(version, deadline_s)
            incarnation = self._client.incarnation
            try:
                generations = await self._generate(request, count, deadline_s)
            except (EngineBusyError, EngineTimeoutError) as error:
                if self._client.incarnation == incarnation:
                    told = await self._diagnose(error)
                    if self._client.incarnation == incarnation:
                        raise told from error
                # The server that had the request was replaced: nothing of it can arrive any more, so it is asked anew.
        found: set[int | None] = {span.version for generation in generations for span in generation.versions}
        if not self._client.dialect.stamps_tokens:
            found.add(self._version)
        if version is not None and found - {version}:
            raise VersionMismatchError(
                "tokens come from other weights than asked for",
                where=f"engine {self.name}",
                seen=f"versions {sorted(found, key=str)}, engine at version {self._version}",
                expected=f"version {version} only",
            )
        return generations

    async def _generate(self, request: GenerateRequest, count: int, deadline_s: float | None) -> tuple[Generation, ...]:
        """Generate once; where the engine does not stamp tokens, find out their version (see ``window``)."""
        if self._client.dialect.stamps_tokens:
            return await self._client.generate_many(request, count, deadline_s=deadline_s)
        limit = self._limit(deadline_s)
        self._about_to_ask += count  # or a pool would take this engine for idle meanwhile
        try:
            before = await self.read_version(deadline_s=limit)
        finally:
            self._about_to_ask -= count
        generations = await self._client.generate_many(request, count, deadline_s=deadline_s)
        older = min(before, await self.read_version(deadline_s=limit))
        return tuple(
            replace(g, versions=(VersionSpan(older, 0, len(g.tokens)),) if g.tokens else ()) for g in generations
        )

    def _limit(self, deadline_s: float | None) -> float:
        return self._client.request_deadline_s if deadline_s is None else deadline_s

    async def _ready_at(self, version: int | None, deadline_s: float | None) -> None:
        limit = self._limit(deadline_s)
        if self.state is not EngineState.READY:
            await self._client.within(limit, self._states.until_ready(), "waiting until it is ready")
        if version is None or self._version == version:
            return
        # Only the core knows, and one that hangs must not be waited for longer than a request would be.
        if await self.read_version(deadline_s=limit) != version:
            raise VersionMismatchError(
                "engine has other weights than asked for",
                where=f"engine {self.name}",
                seen=f"version {self._version}",
                expected=f"version {version}",
                fix="commit the weights to every engine before generating",
            )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop scheduling. ``keep`` freezes running requests, ``wait`` lets them end first, ``abort`` cuts them."""
        self._states.check(EngineState.PAUSED)
        await self._call("POST", "/pause", params={"mode": mode})
        self._states.move(EngineState.PAUSED)

    async def resume(self) -> None:
        """Go on after a pause; frozen requests continue."""
        self._states.require(EngineState.PAUSED, "resume")
        await self._call("POST", "/resume")
        self._states.move(EngineState.READY)

    async def sleep(self, level: int = 1, mode: PauseMode = "wait") -> None:
        """Give device memory back (needs ``enable_sleep_mode`` on a GPU).

        Args:
            level: 1 keeps the weights in host memory; 2 discards them, so that they must be sent again.
            mode: What happens to running requests, as in ``pause``.
        """
        self._states.check(EngineState.ASLEEP)
        await self._call("POST", "/sleep", params={"level": level, "mode": mode})
        self._states.move(EngineState.ASLEEP)

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Take device memory again.

        Args:
            tags: Only these parts (``"weights"``, ``"kv_cache"``); the engine is ready once all are awake.
        """
        self._states.require(EngineState.ASLEEP, "wake")
        answer = await self._call("POST", "/wake_up", params=[("tags", tag) for tag in tags])
        if not isinstance(answer, dict) or answer.get("status", "awake") == "awake":
            self._states.move(EngineState.READY)

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Hold the engine in ``updating`` while somebody sends it weights, and believe only what it says afterwards.

        On leaving, the engine is asked for its version. The new one: the update is committed. The old one: the update
        did not happen and the engine serves as before (an error from inside goes on). Anything else, or no answer: the
        weights are torn, and the engine refuses to generate until an update is committed.

        Args:
            version: The version that the weights will have.

        Raises:
            VersionMismatchError: When nothing failed and yet the engine still has the old version.
        """
        before, came_from = self._version, self.state
        was_torn = came_from is EngineState.TORN
        self._states.move(EngineState.UPDATING)
        after = EngineState.ASLEEP if came_from is EngineState.ASLEEP else EngineState.READY
        try:
            yield
        except BaseException:
            await self._settle(before, version, after, was_torn=was_torn)
            raise
        if await self._settle(before, version, after, was_torn=was_torn) != version:
            raise VersionMismatchError(
                "update left the engine at another version",
                where=f"engine {self.name}",
                seen=f"version {self._version}, state {self.state}",
                expected=f"version {version}",
            )

    async def _settle(self, before: int | None, version: int, after: EngineState, *, was_torn: bool) -> int | None:
        try:
            now = await self.read_version()
        except EngineDeadError:
            raise
        except EngineError as error:
            self._states.move(EngineState.TORN, f"version unknown after an update to {version}: {error}")
            return None
        if now == version or (now == before and not was_torn):
            self._states.move(after)
        else:
            self._states.move(EngineState.TORN, f"version {now} after an update from {before} to {version}")
        return now

    def mark_torn(self, reason: str) -> None:
        """Declare the weights not whole, for example after a digest that differs."""
        self._states.move(EngineState.TORN, reason)

    async def health(self) -> None:
        """Ask whether the server answers and its core lives (a core that hangs lives: see ``probe``).

        Raises:
            EngineDeadError: When its process ended.
            EngineError: When it does not answer, or says that its core is dead.
        """
        await self._call("GET", "/health")

    async def probe(self, deadline_s: float = 30.0) -> None:
        """Generate one token: the only question that a server with a hung core cannot answer.

        Raises:
            EngineError: When there is no valid answer in time.
        """
        request = GenerateRequest((0,), SamplingParams(max_tokens=1), seed=0, request_id=f"{self.name}-probe")
        try:
            await self._client.generate(request, deadline_s=deadline_s)
        except (EngineBusyError, EngineTimeoutError) as error:
            raise await self._diagnose(error) from error

    async def abort_all(self) -> None:
        """Cut every running request; each comes back with the tokens it has, as ``aborted``."""
        await self._call("POST", "/abort_requests", json={})

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Cut these running requests; each comes back with the tokens it has, as ``aborted``. Others are not touched.

        Args:
            request_ids: ``GenerateRequest.request_id`` of each; ids that are not running are ignored.
        """
        names = [f"{_REQUEST_PREFIX}{name}" for name in request_ids]
        if names:  # an empty list would cut all of them
            await self._call("POST", "/abort_requests", json={"request_ids": names})

    async def stop(self) -> None:
        """Close the connections. The server goes on: it is not ours."""
        await self._client.close()
        self._states.move(EngineState.STOPPED)

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            return await self._client.control(method, path, **options)
        except (EngineBusyError, EngineTimeoutError) as error:
            raise await self._diagnose(error) from error

    async def _diagnose(self, error: EngineError) -> EngineError:
        """Return the error that tells more than ``error`` does; who owns the process knows more."""
        return error
