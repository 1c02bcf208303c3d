"""One engine: an actor that owns a vLLM server process and nothing else.

The rollout talks to the server directly, by its address. This actor starts it, says how it is, and ends it; when the
server has died, it alone can say how, because the process and its log are here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vime_rollout import EngineConfig, VLLMEngine

from vime_integration.cluster import log_to_file

logger = logging.getLogger(__name__)

#: Seconds in which an engine that works makes one token, on a loaded CPU too.
PROBE_S = 60.0


@dataclass(frozen=True)
class EngineAddress:
    """Where a started engine can be reached.

    Attributes:
        name: Its name in logs and errors.
        url: Address of its server.
        start_seconds: Seconds from start to the first token.
    """

    name: str
    url: str
    start_seconds: float


class EngineActor:
    """Owns one vLLM server.

    Args:
        config: How to start it.
        log: This actor's own log file (the server has another).
    """

    def __init__(self, config: EngineConfig, log: Path) -> None:
        """Keep the configuration; ``start`` starts."""
        log_to_file(log)
        self._engine = VLLMEngine(config)

    async def start(self) -> EngineAddress:
        """Start the server and return its address once it has generated a token.

        Raises:
            EngineStartError: It did not start; with the tail of its log.
        """
        await self._engine.start()
        return self._address()

    async def restart(self) -> EngineAddress:
        """End what is left of the server and start another one.

        Raises:
            EngineStartError: It did not start; with the tail of its log.
        """
        await self._engine.restart()
        return self._address()

    def _address(self) -> EngineAddress:
        logger.info("%s answers at %s after %.1f s", self._engine.name, self._engine.url, self._engine.start_seconds)
        return EngineAddress(self._engine.name, self._engine.url, self._engine.start_seconds)

    async def health(self) -> None:
        """Return when the server is well.

        Raises:
            EngineError: It died (with the tail of its log) or does not answer.
        """
        await self._engine.health()

    async def probe(self) -> None:
        """Return when the engine has generated a token: the only question that a hung core cannot answer.

        Raises:
            EngineError: No token came, or the server died.
        """
        await self._engine.health()
        await self._engine.probe(PROBE_S)

    async def pids(self) -> list[int]:
        """Return the ids of the server's living processes."""
        return self._engine.pids

    async def stop(self) -> None:
        """End the server's process tree."""
        await self._engine.stop()
