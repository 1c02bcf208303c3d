"""Several engines behind the face of one: least loaded first, or always the same one for a session.

What happens when an engine is lost (dead, torn, failing, silent beyond a deadline) is a decision, not an accident:

* ``on_loss="raise"`` ends the step with the cause;
* ``"reroute"`` leaves the engine out and sends its requests to another one; none left is an error;
* ``"wait"`` does the same, and when none is left the requests wait for one to come back.

Sending a request again is safe: a request without an answer has left no sample behind, and its seed makes the same one
elsewhere. One request may lose only so many engines (``max_losses``): one that kills what it touches must not go round.

A lost engine is out at once and stays out until it is taken back by whoever restarted it and sent it the weights:
``readmit`` (the same object, reconnected) or ``replace`` (another object of its name). An error that a replaced engine
still reports is no loss of its successor. ``lose`` declares an engine lost from outside, and cuts what it has in
flight, so that a supervisor who saw its death need not wait for deadlines.

Sticky sessions use rendezvous hashing: each session ranks all engines by a hash of both names and goes to the first one
that serves, so losing an engine moves only the sessions that it had, and its return brings them back.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from vime_rollout.engine.remote import Engine, RemoteEngine
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
_RETURNING = frozenset({EngineState.DEAD, EngineState.STARTING})
_LOOK_AGAIN_S = 1.0
_SERVING = frozenset({EngineState.READY, EngineState.PAUSED, EngineState.UPDATING})


class EnginePool:
    """Spreads requests over engines; itself an ``Engine``.

    Args:
        engines: At least one, with distinct names.
        on_loss: What to do when an engine is lost in the middle of a request.
        name: Name in errors.
        return_deadline_s: Seconds that a request waits for a lost engine to come back, with ``on_loss="wait"``.
        max_losses: Engines that one request may lose before its error is raised.

    Raises:
        EngineStateError: When there is no engine, or two have one name.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        on_loss: Literal["raise", "reroute", "wait"] = "raise",
        name: str = "pool",
        return_deadline_s: float = 900.0,
        max_losses: int = 3,
    ) -> None:
        """Keep the engines; they are started and stopped by their owner."""
        names = [engine.name for engine in engines]
        if not names or len(set(names)) != len(names):
            raise EngineStateError("pool needs engines of distinct names", where=name, seen=str(names))
        self.name = name
        self._engines = {engine.name: engine for engine in engines}
        self._on_loss = on_loss
        self._return_deadline_s = return_deadline_s
        self._max_losses = max_losses
        self._lost: dict[str, EngineError] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines, lost ones too."""
        return tuple(self._engines.values())

    @property
    def state(self) -> EngineState:
        """Ready while one engine can serve, else the state of the first."""
        return EngineState.READY if self._serving() else self.engines[0].state

    @property
    def in_flight(self) -> int:
        """Samples that wait or run in all engines."""
        return sum(engine.in_flight for engine in self.engines)

    @property
    def lost(self) -> dict[str, EngineError]:
        """Engines that failed a request and were left out, with the error of each."""
        return dict(self._lost)

    def readmit(self, name: str) -> None:
        """Take a lost engine back, once it is restarted, reconnected and has the weights.

        Raises:
            EngineStateError: When it is not lost, or does not serve.
        """
        if name not in self._lost:
            raise EngineStateError("engine is not lost", where=self.name, seen=name, expected=str(list(self._lost)))
        self._check_serves(self._engines[name])
        del self._lost[name]
        self._wake()

    def replace(self, engine: Engine) -> Engine:
        """Put an engine into the place of the one of its name, lost or not; whoever waits for it goes on.

        Args:
            engine: Connected, with the weights.

        Returns:
            The engine that was there; what it has in flight may still end well, and is retried elsewhere if not.

        Raises:
            EngineStateError: When no engine has that name, or the new one does not serve.
        """
        if engine.name not in self._engines:
            names = str(list(self._engines))
            raise EngineStateError("pool has no engine of this name", where=self.name, seen=engine.name, expected=names)
        self._check_serves(engine)
        old, self._engines[engine.name] = self._engines[engine.name], engine
        self._lost.pop(engine.name, None)
        self._wake()
        return old

    async def lose(self, name: str, error: EngineError) -> None:
        """Leave an engine out from now on, and cut what it has in flight.

        Args:
            name: Which one.
            error: What became of it.

        Raises:
            EngineStateError: When no engine has that name.
        """
        engine = self._engines.get(name)
        if engine is None:
            names = str(list(self._engines))
            raise EngineStateError("pool has no engine of this name", where=self.name, seen=name, expected=names)
        self._lost.setdefault(name, error)
        if isinstance(engine, RemoteEngine):
            await engine.give_up(str(error))

    async def generate(
        self, request: GenerateRequest, *, version: int | None = None, deadline_s: float | None = None
    ) -> Generation:
        """Generate one response on one of the engines; see ``generate_many``."""
        (generation,) = await self.generate_many(request, 1, version=version, deadline_s=deadline_s)
        return generation

    async def generate_many(
        self, request: GenerateRequest, count: int, *, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Generate several responses on one of the engines; a loss costs all of them, and all are made again.

        Args:
            request: What to generate; requests of one ``session_id`` go to one engine while it serves.
            count: How many; the i-th is what ``request.alone(i)`` makes.
            version: Weights that every token must come from.
            deadline_s: Seconds for one engine.

        Raises:
            EngineError: The engine's own error; unless ``on_loss`` is ``"raise"`` only when no engine is left (and none
                came back in time), or after ``max_losses`` engines.
        """
        losses = 0
        while True:
            engine = await self._choose(request.session_id)
            try:
                return await engine.generate_many(request, count, version=version, deadline_s=deadline_s)
            except _LOSSES as error:
                if self._on_loss == "raise":
                    raise
                if self._engines[engine.name] is engine:
                    self._lost.setdefault(engine.name, error)
                losses += 1
                if losses >= self._max_losses:
                    error.add_note(f"the request lost {losses} engines of {self.name}; it may be what they fail on")
                    raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Cut running requests on all engines that serve; see ``RemoteEngine.abort``.

        Raises:
            EngineError: The first engine's error, when one cannot be told.
        """
        names = list(request_ids)
        await asyncio.gather(*(engine.abort(names) for engine in self._serving()))

    def _serving(self) -> list[Engine]:
        return [e for e in self.engines if e.state in _SERVING and e.name not in self._lost]

    async def _choose(self, session_id: str) -> Engine:
        serving = self._serving() or await self._returned()
        if session_id:
            return max(serving, key=lambda e: hashlib.blake2b(f"{session_id}/{e.name}".encode()).digest())
        return min(serving, key=lambda e: e.in_flight)

    async def _returned(self) -> list[Engine]:
        """Wait until an engine serves again; a return that no call here announced is seen by looking now and then."""
        end = time.monotonic() + self._return_deadline_s
        while self._may_return() and (left := end - time.monotonic()) > 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=min(left, _LOOK_AGAIN_S))
            finally:
                self._waiters.discard(waiter)
            if serving := self._serving():
                return serving
        states = ", ".join(f"{e.name} {e.state}{' (lost)' * (e.name in self._lost)}" for e in self.engines)
        raise EngineStateError(
            "no engine can serve",
            where=self.name,
            seen=states,
            expected="one that is ready",
            fix="restart a lost engine, send it the weights, and readmit it",
        ) from next(iter(self._lost.values()), None)

    def _may_return(self) -> bool:
        """Tell whether waiting can help: what sleeps or was stopped on purpose does not come back by itself."""
        return self._on_loss == "wait" and any(e.name in self._lost or e.state in _RETURNING for e in self.engines)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _check_serves(self, engine: Engine) -> None:
        if engine.state not in _SERVING:
            raise EngineStateError(
                "engine does not serve",
                where=f"engine {engine.name}, {self.name}",
                seen=str(engine.state),
                expected="one that is ready: start or reconnect it first",
            )
