"""The states of an engine and the moves between them.

::

    new -> starting -> ready <-> paused
                       ready, paused, asleep, torn -> updating -> where it came from (torn and paused: ready)
                       ready <-> asleep
    any -> torn      weights are not known to be whole; only an update mends it
    any -> dead      the process is gone; final, but for a restart
    any -> stopped   ended on purpose; final
    any -> starting  by ``restart`` only: another server takes the place of the one that was there

A request is sent in ``ready`` only. In ``paused`` and ``updating`` it waits, because both end by themselves; in every
other state it is refused. An illegal move is an error that names both states, so a pipeline that wakes what is not
asleep is told so instead of being obeyed by luck.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

from vime_rollout.errors import EngineDeadError, EngineStateError, EngineTornError


class EngineState(StrEnum):
    """Where an engine stands."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    UPDATING = "updating"
    ASLEEP = "asleep"
    TORN = "torn"
    DEAD = "dead"
    STOPPED = "stopped"


_S = EngineState
_MOVES: dict[EngineState, frozenset[EngineState]] = {
    _S.NEW: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.READY}),
    _S.READY: frozenset({_S.PAUSED, _S.UPDATING, _S.ASLEEP}),
    _S.PAUSED: frozenset({_S.READY, _S.UPDATING}),
    _S.UPDATING: frozenset({_S.READY, _S.ASLEEP}),
    _S.ASLEEP: frozenset({_S.READY, _S.UPDATING}),
    _S.TORN: frozenset({_S.UPDATING}),
    _S.DEAD: frozenset(),
    _S.STOPPED: frozenset(),
}
_FINAL = frozenset({_S.DEAD, _S.STOPPED})
_MISHAPS = frozenset({_S.TORN, _S.DEAD})
_PASSING = frozenset({_S.STARTING, _S.PAUSED, _S.UPDATING})


class StateMachine:
    """Holds the state of one engine, refuses illegal moves, and wakes those who wait for ``ready``.

    Args:
        name: Name of the engine, for errors.
    """

    def __init__(self, name: str) -> None:
        """Begin in ``new``."""
        self._name = name
        self._state = EngineState.NEW
        self._reason = ""
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it is torn or dead; empty otherwise."""
        return self._reason

    def check(self, to: EngineState) -> None:
        """Refuse an illegal move without making it.

        Raises:
            EngineDeadError: From ``dead``.
            EngineStateError: For every other illegal move; names both states.
        """
        mishaps = frozenset() if self._state in _FINAL else _MISHAPS
        if to in _MOVES[self._state] | mishaps or to is EngineState.STOPPED:
            return
        if self._state is EngineState.DEAD:
            self._refuse_dead()
        legal = ", ".join(sorted(_MOVES[self._state])) or "nothing"
        raise EngineStateError(
            "illegal move of an engine",
            where=f"engine {self._name}",
            seen=f"{self._state} -> {to}",
            expected=f"from {self._state}: {legal}",
        )

    def require(self, state: EngineState, action: str) -> None:
        """Refuse an action that only makes sense in ``state``.

        Raises:
            EngineDeadError: When the engine is dead.
            EngineStateError: When it is in another state; names both.
        """
        if self._state is EngineState.DEAD:
            self._refuse_dead()
        if self._state is not state:
            raise EngineStateError(
                f"cannot {action} an engine in this state",
                where=f"engine {self._name}",
                seen=str(self._state),
                expected=str(state),
            )

    def move(self, to: EngineState, reason: str = "") -> None:
        """Move, or raise as ``check`` does.

        Args:
            to: The new state.
            reason: Why; kept for ``torn`` and ``dead``.
        """
        self.check(to)
        if to is EngineState.STOPPED and self._state is EngineState.DEAD:
            return  # a dead engine stays dead, so that its reason is not lost
        self._enter(to, reason)

    def restart(self) -> None:
        """Go to ``starting`` from any state: a new server, or a new way to one, is on its way.

        Raises:
            EngineStateError: When it is starting already.
        """
        if self._state is EngineState.STARTING:
            raise EngineStateError(
                "engine is starting already",
                where=f"engine {self._name}",
                seen=str(self._state),
                expected="one start at a time",
            )
        self._enter(EngineState.STARTING, "")

    def _enter(self, to: EngineState, reason: str) -> None:
        self._state = to
        self._reason = reason
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until_ready(self) -> None:
        """Return once the engine is ready; wait through states that pass. The caller sets the deadline.

        Raises:
            EngineDeadError: When it is dead.
            EngineTornError: When its weights are torn.
            EngineStateError: In every other state that does not pass by itself.
        """
        while self._state is not EngineState.READY:
            if self._state is EngineState.DEAD:
                self._refuse_dead()
            if self._state is EngineState.TORN:
                raise EngineTornError(
                    "engine has torn weights",
                    where=f"engine {self._name}",
                    seen=self._reason,
                    fix="send the weights again; it serves once an update is committed",
                )
            if self._state not in _PASSING:
                raise EngineStateError(
                    "engine cannot serve", where=f"engine {self._name}", seen=str(self._state), expected="ready"
                )
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _refuse_dead(self) -> None:
        raise EngineDeadError("engine is dead", where=f"engine {self._name}", seen=self._reason, fix="restart it")
