"""vllm-router in front of several engines: one address for any number of clients, sessions that stay where they are.

An ``EnginePool`` routes inside one process. A router is a process of its own (the package ``vllm-router``), for engines
that several rollouts share. Each session (``x-session-id``) has its engine by consistent hashing, so the turns of a
trajectory find their keys and values, and losing an engine moves only the sessions that it had.

What goes through the router are generations. What concerns one engine (its version, pauses, weights) goes to that
engine, because a router would send it to any of them: ``RoutedEngines`` knows both.

A dead engine leaves at once: by itself the router notices after its next health check, and until then answers errors
for its sessions. ``RoutedEngines`` asks the engines after the first such error, takes those that do not answer out of
the router, and sends the request again. ``lose`` takes one out at once, ``readmit`` brings it back.

The router is started below keeper and warden, as engines are, and never outlives its owner. It owns no engine: stopping
it ends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vime_rollout.engine.client import EngineClient
from vime_rollout.engine.ports import held_port
from vime_rollout.engine.process import EngineProcess
from vime_rollout.engine.remote import RemoteEngine
from vime_rollout.engine.request import GenerateRequest, Generation
from vime_rollout.engine.state import EngineState
from vime_rollout.errors import (
    EngineBusyError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    EngineStateError,
    VersionMismatchError,
)

_POLL_S = 0.1
# Names, so that what looks through this package for routes and options of vLLM's server does not take these for them.
_LIST, _ADD, _REMOVE = "/list_workers", "/add_worker", "/remove_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How to start a router.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        log_path: Where its output goes.
        policy: vllm-router's policy; ``consistent_hash`` and ``sticky_least_loaded`` keep sessions together.
        health_interval_s: Seconds between the health checks that it makes by itself.
        request_deadline_s: Seconds for one response, in the router and in its clients.
        control_deadline_s: Seconds for a control call.
        start_deadline_s: Seconds from start to ready.
        max_concurrency: Most requests of one client at a time.
        arguments: Further command-line arguments.
    """

    host: str = "127.0.0.1"
    port: int = 0
    log_path: str = "router.log"
    policy: str = "consistent_hash"
    health_interval_s: int = 5
    request_deadline_s: float = 600.0
    control_deadline_s: float = 30.0
    start_deadline_s: float = 120.0
    max_concurrency: int = 1024
    arguments: tuple[str, ...] = ()

    def command(self, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
        """Return the command line of a router in front of ``urls``."""
        options = {
            "host": self.host,
            "port": str(port),
            "prometheus-port": str(metrics_port),
            "policy": self.policy,
            "health-check-interval-secs": str(self.health_interval_s),
            "request-timeout-secs": str(int(self.request_deadline_s) + 1),
            "worker-startup-timeout-secs": str(int(self.start_deadline_s)),
            "worker-startup-check-interval": "1",
        }
        pairs = [part for name, value in options.items() for part in (f"--{name}", value)]
        # Retries are the client's: it knows the deadline, and which engines are left.
        flags = [f"--{name}" for name in ("disable-retries", "disable-circuit-breaker", "worker-urls")]
        return [sys.executable, "-m", "vllm_router.launch_router", *pairs, *flags, *urls, *self.arguments]


class Router:
    """One vllm-router process, owned: ``start`` and ``stop``, or ``async with``.

    Args:
        config: How to start it.
        urls: Addresses of the engines, all of which answer.
    """

    def __init__(self, config: RouterConfig, urls: Sequence[str]) -> None:
        """Keep the configuration."""
        self.config = config
        self._urls = [url.rstrip("/") for url in urls]
        self._process: EngineProcess | None = None
        self.client = EngineClient(
            f"http://{config.host}:{config.port}",
            name="router",
            max_concurrency=config.max_concurrency,
            request_deadline_s=config.request_deadline_s,
            control_deadline_s=config.control_deadline_s,
            retries=0,
        )

    @property
    def url(self) -> str:
        """Address of the router."""
        return self.client.url

    @property
    def pids(self) -> list[int]:
        """Ids of its living processes."""
        return [] if self._process is None else self._process.members()

    async def start(self) -> None:
        """Start the router and return once it sees all engines.

        Raises:
            EngineStartError: When vllm-router is not installed, the port is busy, it dies or is late; with its log.
        """
        if find_spec("vllm_router") is None:
            raise EngineStartError("vllm-router is not installed", fix="pip install 'vime-rollout[router]'")
        config = self.config
        held = held_port(config.host, config.port, "router"), held_port(config.host, 0, "router's metrics")
        with held[0] as port, held[1] as metrics_port:
            await self.client.move(f"http://{config.host}:{port}")
            command = config.command(port, metrics_port, self._urls)
            self._process = EngineProcess(command, dict(os.environ), Path(config.log_path), grace_s=5.0, name="router")
            try:
                await self._until_ready(self._process, time.monotonic() + config.start_deadline_s)
            except BaseException:
                await self.stop()
                raise

    async def _until_ready(self, process: EngineProcess, deadline: float) -> None:
        while True:
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                raise EngineStartError(
                    "router did not start" if code is None else "router died while starting",
                    where=f"router at {self.url}",
                    seen=process.log_tail() if code is None else process.describe_end(code),
                )
            with contextlib.suppress(EngineError):  # it does not listen yet; the two ends above are the bounds
                if sorted(await self.workers()) == sorted(self._urls):
                    return
            await asyncio.sleep(_POLL_S)

    async def health(self) -> None:
        """Ask whether the router lives and has an engine that does.

        Raises:
            EngineDeadError: When its process ended; with the tail of its log.
            EngineError: When it does not answer, or has no healthy engine.
        """
        code = None if self._process is None else self._process.poll()
        if self._process is None or code is not None:
            seen = "not started" if self._process is None or code is None else self._process.describe_end(code)
            raise EngineDeadError("router is dead", where=f"router at {self.url}", seen=seen, fix="start a new one")
        await self.client.control("GET", "/health", text=True)

    async def workers(self) -> list[str]:
        """Return the addresses of the engines that it sends requests to."""
        answer: Any = await self.client.control("GET", _LIST)
        return [str(url) for url in answer["urls"]]

    async def add(self, url: str) -> None:
        """Send requests to one more engine; returns once the router sees that it is well."""
        if url.rstrip("/") not in await self.workers():
            await self.client.control("POST", _ADD, text=True, params={"url": url.rstrip("/")})

    async def remove(self, url: str) -> None:
        """Send no more requests to an engine; it is not ended."""
        if url.rstrip("/") in await self.workers():
            await self.client.control("POST", _REMOVE, text=True, params={"url": url.rstrip("/")})

    async def stop(self) -> None:
        """End the router's process tree. Safe to call again."""
        await self.client.close()
        if self._process is not None:
            await asyncio.shield(asyncio.to_thread(self._process.stop))

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()


class RoutedEngines:
    """Engines behind a router, with the face of one; see the module's docstring.

    Args:
        router: Started, with the addresses of these engines.
        engines: Connected, of distinct names; all must stamp tokens with versions (vLLM 0.32).
        health_deadline_s: Seconds that an engine may take to say that it is well, after an error.
        max_losses: Engines that one request may lose before its error is raised.
        return_deadline_s: Seconds that a request waits for an engine to come back when none is left.

    Raises:
        EngineStateError: When an engine does not stamp tokens: nobody could say which one answered.
    """

    def __init__(
        self,
        router: Router,
        engines: Sequence[RemoteEngine],
        *,
        health_deadline_s: float = 10.0,
        max_losses: int = 3,
        return_deadline_s: float = 0.0,
    ) -> None:
        """Keep the parts; they are started and stopped by their owners."""
        for engine in engines:
            if not engine.dialect.stamps_tokens:
                raise EngineStateError(
                    "engine behind a router does not stamp tokens with versions",
                    where=f"engine {engine.name} at {engine.url}",
                    seen=f"vLLM {engine.dialect.release}",
                    expected="vLLM 0.32",
                    fix="use an EnginePool, which asks each engine",
                )
        self.name = "router"
        self._return_deadline_s = return_deadline_s
        self.router = router
        self.engines = {engine.name: engine for engine in engines}
        self._health_deadline_s = health_deadline_s
        self._max_losses = max_losses
        self._lost: dict[str, EngineError] = {}

    @property
    def state(self) -> EngineState:
        """Ready while one engine is in the router."""
        return EngineState.READY if len(self._lost) < len(self.engines) else EngineState.DEAD

    @property
    def in_flight(self) -> int:
        """Samples of this client that wait or run."""
        return self.router.client.in_flight

    @property
    def lost(self) -> dict[str, EngineError]:
        """Engines that were taken out of the router, with the reason of each."""
        return dict(self._lost)

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Generate one response on the engine that the router chooses; see ``generate_many``."""
        (generation,) = await self.generate_many(request, 1, version=version, deadline_s=deadline_s)
        return generation

    async def generate_many(
        self, request: GenerateRequest, count: int, *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Generate several responses on the engine that the router chooses.

        Args:
            request: What to generate; requests of one ``session_id`` go to one engine.
            count: How many; the i-th is what ``request.alone(i)`` makes.
            version: Weights that every token must come from.
            deadline_s: Seconds for one try.

        Raises:
            VersionMismatchError: When a token came from another version.
            EngineStateError: When no engine is left.
            EngineError: From the engine or the router.
        """
        losses = 0
        while True:
            await self._until_one_is_left()
            try:
                generations = await self.router.client.generate_many(request, count, deadline_s=deadline_s)
            except EngineBusyError as error:
                await self.router.health()  # a dead router is told as such
                losses += 1
                # A loss that another request has seen already counts as one: this one was at that engine as well.
                if losses >= self._max_losses or not (await self._find_lost() or self._lost):
                    raise
                error.add_note("tried again")
                continue
            found = {span.version for generation in generations for span in generation.versions}
            if version is not None and found - {version}:
                raise VersionMismatchError(
                    "tokens come from other weights than asked for",
                    where=f"an engine behind {self.router.url}",
                    seen=f"versions {sorted(found)}",
                    expected=f"version {version} only",
                    fix="commit the weights to every engine before generating",
                )
            return generations

    async def _until_one_is_left(self) -> None:
        deadline = time.monotonic() + self._return_deadline_s
        while self.state is EngineState.DEAD:
            if time.monotonic() >= deadline:
                raise EngineStateError(
                    "no engine is left behind the router",
                    where=self.router.url,
                    seen=f"{list(self._lost)} lost, none came back in {self._return_deadline_s:g} s",
                    fix="restart a lost engine, send it the weights, and readmit it",
                ) from next(iter(self._lost.values()), None)
            await asyncio.sleep(_POLL_S)

    async def _find_lost(self) -> list[str]:
        """Ask all engines how they are, take out those that do not answer, and return their names."""

        async def ask(engine: RemoteEngine) -> EngineError | None:
            try:
                async with asyncio.timeout(self._health_deadline_s):
                    await engine.health()
            except EngineError as error:
                return error
            except TimeoutError:
                return EngineDeadError("engine does not answer", where=f"engine {engine.name} at {engine.url}")
            return None

        engines = [engine for name, engine in self.engines.items() if name not in self._lost]
        answers = await asyncio.gather(*map(ask, engines))
        found = [(engine.name, error) for engine, error in zip(engines, answers, strict=True) if error is not None]
        for name, error in found:
            await self.lose(name, error)
        return [name for name, _ in found]

    async def lose(self, name: str, error: EngineError) -> None:
        """Take an engine out of the router. What it has in flight is sent elsewhere once its process is gone.

        Args:
            name: Which one.
            error: What became of it.
        """
        self._lost.setdefault(name, error)
        await self.router.remove(self.engines[name].url)

    async def readmit(self, name: str) -> None:
        """Bring an engine back that was restarted, reconnected, and has the weights.

        Raises:
            EngineStateError: When it is not lost, or does not serve.
        """
        engine = self.engines[name]
        if name not in self._lost or engine.state is not EngineState.READY:
            seen = f"{name} {engine.state}"
            raise EngineStateError("engine cannot be brought back", where=self.router.url, seen=seen, expected="ready")
        await self.router.add(engine.url)
        del self._lost[name]

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Cut running requests, on whichever engine they are."""
        names = list(request_ids)
        await asyncio.gather(*(e.abort(names) for name, e in self.engines.items() if name not in self._lost))
