"""Several engines behind the face of one: least loaded first, or always the same one for a session.

What happens when an engine dies is a decision, not an accident: ``on_loss="raise"`` ends the step with the cause;
``on_loss="reroute"`` leaves the lost engine out, sends its requests to another one (safe, because a request without an
answer has left no sample behind, and its seed makes the same one elsewhere), and lists it in ``lost``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from vime_rollout.engine.remote import Engine
from vime_rollout.engine.request import GenerateRequest, Generation
from vime_rollout.engine.state import EngineState
from vime_rollout.errors import (
    EngineBusyError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineTornError,
)

_LOSSES = (EngineDeadError, EngineTornError, EngineBusyError, EngineTimeoutError)
_SERVING = frozenset({EngineState.READY, EngineState.PAUSED, EngineState.UPDATING})


class EnginePool:
    """Spreads requests over engines; itself an ``Engine``.

    Args:
        engines: At least one, with distinct names.
        on_loss: What to do when an engine is lost in the middle of a request.
        name: Name in errors.

    Raises:
        EngineStateError: When there is no engine, or two have one name.
    """

    def __init__(
        self, engines: Sequence[Engine], *, on_loss: Literal["raise", "reroute"] = "raise", name: str = "pool"
    ) -> None:
        """Keep the engines; they are started and stopped by their owner."""
        names = [engine.name for engine in engines]
        if not names or len(set(names)) != len(names):
            raise EngineStateError("pool needs engines of distinct names", where=name, seen=str(names))
        self.name = name
        self.engines = tuple(engines)
        self._on_loss = on_loss
        self._lost: dict[str, EngineError] = {}

    @property
    def state(self) -> EngineState:
        """Ready while one engine can serve, else the state of the first."""
        return EngineState.READY if self._serving() else self.engines[0].state

    @property
    def in_flight(self) -> int:
        """Requests that wait or run in all engines."""
        return sum(engine.in_flight for engine in self.engines)

    @property
    def lost(self) -> dict[str, EngineError]:
        """Engines that failed a request and were left out, with the error of each."""
        return dict(self._lost)

    def readmit(self, name: str) -> None:
        """Take a lost engine back, once it is restarted and has the weights.

        Raises:
            EngineStateError: When it is not lost.
        """
        if self._lost.pop(name, None) is None:
            raise EngineStateError("engine is not lost", where=self.name, seen=name, expected=str(list(self._lost)))

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Generate one response on one of the engines.

        Args:
            request: What to generate; requests of one ``session_id`` go to one engine while it serves.
            version: Weights that every token must come from.
            deadline_s: Seconds for one engine.

        Raises:
            EngineError: The engine's own error; with ``reroute`` only when no engine is left.
        """
        while True:
            engine = self._choose(request.session_id)
            try:
                return await engine.generate(request, version=version, deadline_s=deadline_s)
            except _LOSSES as error:
                if self._on_loss == "raise":
                    raise
                self._lost[engine.name] = error  # one engine fewer each time round: the loop ends

    def _serving(self) -> list[Engine]:
        return [e for e in self.engines if e.state in _SERVING and e.name not in self._lost]

    def _choose(self, session_id: str) -> Engine:
        serving = self._serving()
        if not serving:
            states = ", ".join(f"{e.name} {e.state}" for e in self.engines)
            error = EngineStateError("no engine can serve", where=self.name, seen=states, expected="one that is ready")
            raise error from next(iter(self._lost.values()), None)
        if session_id:
            # Rendezvous hashing: losing one engine moves only the sessions that it had.
            return max(serving, key=lambda e: hashlib.blake2b(f"{session_id}/{e.name}".encode()).digest())
        return min(serving, key=lambda e: e.in_flight)
