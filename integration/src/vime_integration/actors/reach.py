"""How the rollout reaches its engines: each by its address, dealt out by a pool or behind vllm-router.

Either way engines come and go one by one: lost ones are left out until they are back with the weights of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from vime_grpo import RunConfig
from vime_rollout import EngineClient, EnginePool, RemoteEngine
from vime_rollout.errors import EngineDeadError
from vime_rollout.experimental import RoutedEngines, Router, RouterConfig

from vime_integration.actors.engine import EngineAddress
from vime_integration.translate import return_deadline


class Reach:
    """Connections to the engines of a run.

    Args:
        config: The run's configuration.
        log: The router's log file, where there is a router.
    """

    def __init__(self, config: RunConfig, log: Path) -> None:
        """Keep the configuration; ``connect`` connects."""
        self._config = config
        self._log = log
        self._engines: dict[str, RemoteEngine] = {}
        self._router: Router | None = None
        self._front: EnginePool | RoutedEngines | None = None

    @property
    def count(self) -> int:
        """Number of engines."""
        return len(self._engines)

    @property
    def front(self) -> EnginePool | RoutedEngines:
        """What requests are sent to; an ``Engine``."""
        assert self._front is not None, "connect() comes first"
        return self._front

    async def connect(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to every engine, and start the router if there is to be one.

        Raises:
            EngineError: One does not answer, or the router does not start.
        """
        rollout, section = self._config.rollout, self._config.engine
        for address in addresses:
            client = EngineClient(
                address.url,
                name=address.name,
                max_concurrency=rollout.concurrency,
                request_deadline_s=rollout.request_deadline_s,
                retries=rollout.retries,
            )
            engine = RemoteEngine(address.url, name=address.name, client=client)
            await engine.connect()
            self._engines[address.name] = engine
        engines = list(self._engines.values())
        back_s = return_deadline(self._config)
        if section.router:
            settings = RouterConfig(
                log_path=str(self._log),
                request_deadline_s=rollout.request_deadline_s,
                start_deadline_s=section.start_deadline_s,
                max_concurrency=rollout.concurrency,
            )
            self._router = Router(settings, [engine.url for engine in engines])
            await self._router.start()
            self._front = RoutedEngines(
                self._router, engines, return_deadline_s=back_s, max_losses=section.restarts + 1
            )
            return
        self._front = EnginePool(
            engines,
            on_loss="wait" if back_s else "raise",
            return_deadline_s=back_s,
            max_losses=section.restarts + 1,
        )

    def lost(self) -> dict[str, str]:
        """Return the engines that failed a request and are left out, with the reason of each."""
        return {} if self._front is None else {name: str(error) for name, error in self._front.lost.items()}

    async def let_go(self, name: str) -> None:
        """Leave an engine out: what it has in flight is sent elsewhere, or waits for its return."""
        await self.front.lose(name, EngineDeadError("engine is being started again", where=f"engine {name}"))

    async def take_back(self, address: EngineAddress, version: int) -> None:
        """Take an engine back that was started again and has the weights of the others.

        Args:
            address: Where it is now.
            version: What it must serve.

        Raises:
            EngineError: It does not answer, or serves another version.
        """
        await self._engines[address.name].reconnect(address.url, version=version)
        if isinstance(self.front, RoutedEngines):
            await self.front.readmit(address.name)
        else:
            self.front.readmit(address.name)

    async def sleep(self) -> None:
        """Let every engine give its device memory back; weights wait in host memory.

        Raises:
            EngineError: One did not.
        """
        await asyncio.gather(*(engine.sleep(level=1) for engine in self._engines.values()))

    async def wake(self, tag: str) -> None:
        """Let every engine take back one part of its device memory: "weights" or "kv_cache".

        Raises:
            EngineError: One did not.
        """
        await asyncio.gather(*(engine.wake([tag]) for engine in self._engines.values()))

    async def stop(self) -> None:
        """Close the connections and end the router; no engine is ended."""
        for engine in self._engines.values():
            await engine.stop()
        if self._router is not None:
            await self._router.stop()
