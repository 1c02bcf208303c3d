"""Engines that die or hang: noticed, started again, given the present weights, and taken back.

The order is what keeps a wrong sample out. The rollout first learns that the engine is lost, so nothing is sent to the
new server before it has the weights; the server starts with dummy weights; the session brings it to the version that
the others serve, with a digest if digests are on; only then does the rollout reach it. Requests that the old server
took with it are sent again with the same seeds: a request without an answer has left no sample behind.

The served version can only be sent while the trainer still holds it, which it does not inside a ``writing`` block; an
engine that comes back then gets the next version at the block's end.

How often this may happen is a setting (`engine.restarts`). Beyond it the engine's own account of its death ends the
run: an engine that dies again and again has a cause that no restart mends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from vime_grpo import RunConfig
from vime_rollout.errors import EngineError
from vime_sync import SyncError, SyncReport, SyncSession

from vime_integration.actors.engine import PROBE_S, EngineAddress
from vime_integration.errors import PipelineError
from vime_integration.wait import fetch

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0
# An engine that computes in its server's own process answers between two of its steps, which can be long on a CPU.
HEALTH_DEADLINE_S = 150.0
#: Beyond the rollout's own deadline, so that its error, which knows more, comes first.
GRACE_S = 30.0
_ROLLOUT = "rollout"


@dataclass
class Written:
    """What `Mending.writing` yields.

    Attributes:
        report: Of the update at the block's end; None until then.
    """

    report: SyncReport | None = None


class Mending:
    """Watches the engines while the driver waits, and mends what died.

    Args:
        config: The run's configuration.
        engines: Name -> actor.
        addresses: Name -> where it can be reached.
        trainers: Name -> actor; a dead one ends the run, whatever else its death broke.
        rollout: The rollout's actor.
        session: Updates the engines; closed with this object.
        aliased: Whether engines run on the trainer's memory.
        note: Shows one line to the user.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Mapping[str, Any],
        addresses: Mapping[str, EngineAddress],
        trainers: Mapping[str, Any],
        rollout: Any,
        session: SyncSession,
        aliased: bool,
        note: Callable[[str], None],
    ) -> None:
        """Ask nothing yet."""
        self._config = config
        self._engines, self._addresses, self._trainers = dict(engines), dict(addresses), dict(trainers)
        self._rollout, self._session, self._aliased, self._note = rollout, session, aliased, note
        self._asked: dict[str, tuple[Any, float]] = {}
        self._next = dict.fromkeys([*engines, *trainers, _ROLLOUT], 0.0)
        self._restarts = dict.fromkeys(engines, 0)
        self._at_rest = False  # whether the trainer's weights are those that the engines serve
        self._behind: list[str] = []  # started again, without the served version yet

    @property
    def restarts(self) -> int:
        """Engines that were started again since the run began."""
        return sum(self._restarts.values())

    def __call__(self) -> None:
        """Look at the answers that are there, mend what died, and ask again where it is time.

        Raises:
            EngineError: An engine died once more than may be mended.
            PipelineError: An engine's owner does not answer.
        """
        now = time.monotonic()
        questions = {name: actor.health for name, actor in self._engines.items()}
        questions |= {name: actor.pids for name, actor in self._trainers.items()}
        questions[_ROLLOUT] = self._rollout.lost
        for name, question in questions.items():
            if name not in self._asked:
                if now >= self._next[name]:
                    self._asked[name] = (question.remote(), now)
                continue
            reference, since = self._asked[name]
            if ray.wait([reference], timeout=0)[0]:
                del self._asked[name]
                self._next[name] = now + HEALTH_EVERY_S
                self._heard(name, reference)
            elif now - since > HEALTH_DEADLINE_S and name not in self._trainers:  # a rank at work answers afterwards
                raise PipelineError(
                    "a process of the run does not answer",
                    where=name,
                    seen=f"silence for {HEALTH_DEADLINE_S:g} s",
                    fix=f"see the log files of {name} in the run folder",
                )

    @contextmanager
    def writing(self, version: int) -> Iterator[Written]:
        """A block in which the trainer's weights become ``version``; every engine serves it when the block has ended.

        Engines that run on the trainer's memory are paused for the block; others serve on until its end. Engines that
        died are mended and brought there too.

        Yields:
            An object that holds the report once the block has ended.

        Raises:
            SyncError: An engine that lives refused.
            EngineError: An engine died once more than may be mended.
        """
        written = Written()
        if self._aliased:
            self._mend_now()  # while the trainer still holds what an engine that comes back must be given
        self._at_rest = wrote = False
        try:
            with self._session.writing(version) as block:
                yield written
                wrote = True
            assert block.report is not None
            written.report = block.report
        except SyncError as error:
            if not wrote:
                raise
            written.report = self._despite(version, error)
        self._at_rest = True
        for name in self._behind:
            self._take_back(name)
        self._behind.clear()

    def _despite(self, version: int, error: SyncError) -> SyncReport:
        """Repeat a commit that met dead engines, once they are there again; others may have committed already.

        A core that hangs is as good as dead, and only a token that does not come tells it: its server says it is well.
        """
        dead = {name: told for name in self._engines if (told := self._account_of(name, probe=True)) is not None}
        if not dead and not self._behind:
            raise error
        logger.warning("the update to version %d met dead engines: %s", version, error)
        for name, told in dead.items():
            self._restart(name, told)
        if self._session.served < version:
            return self._session.update(version)
        reports = [self._session.resync(self._addresses[name].url) for name in self._behind]
        return reports[-1]

    def counts(self) -> dict[str, float]:
        """Return ``engine/restarts``, and ``sync/engine_version/{min,max}`` as the engines say, if all do."""
        counts = {"engine/restarts": float(self.restarts)}
        try:
            versions = self._session.versions()
        except SyncError as error:
            logger.warning("no versions to record: %s", error)  # whoever watches next finds the engine and mends it
            return counts
        return counts | {
            "sync/engine_version/min": float(min(versions)),
            "sync/engine_version/max": float(max(versions)),
        }

    def close(self) -> None:
        """Let the engines go."""
        self._session.close()

    def _heard(self, name: str, reference: Any) -> None:
        if name == _ROLLOUT:
            lost: dict[str, str] = fetch(reference, name=name, doing="say which engines it lost", deadline_s=10.0)
            for engine, reason in lost.items():
                self._mend(engine, EngineError("engine was lost by the rollout", where=engine, seen=reason))
            return
        try:
            fetch(reference, name=name, doing="say how it is", deadline_s=10.0)
        except EngineError as error:
            self._mend(name, error)

    def check_trainers(self) -> None:
        """Tell of a trainer rank that died; one that is busy is alive.

        Raises:
            PipelineError: A rank died.
        """
        asked = {actor.pids.remote(): name for name, actor in self._trainers.items()}
        if not asked:
            return
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
        for reference in answered:
            fetch(reference, name=asked[reference], doing="say how it is", deadline_s=10.0)

    def _account_of(self, name: str, *, probe: bool = False) -> EngineError | None:
        """Return an engine's own account of its death, or None when it is well; with ``probe``, when it generates."""
        actor = self._engines[name]
        question = actor.probe.remote() if probe else actor.health.remote()
        try:
            fetch(question, name=name, doing="say how it is", deadline_s=HEALTH_DEADLINE_S + PROBE_S)
        except EngineError as error:
            return error
        return None

    def _mend_now(self) -> None:
        for name in self._engines:
            if (told := self._account_of(name)) is not None:
                self._mend(name, told)

    def _mend(self, name: str, error: EngineError) -> None:
        if name in self._behind or name not in self._engines:
            if name in self._engines:
                return
            raise error  # somebody else's engine: not ours to start
        if self._aliased and not self._at_rest:
            return  # it could not start on memory that is being written; the commit at the block's end will meet it
        self._restart(name, error)
        if self._at_rest:
            self._session.resync(self._addresses[name].url)
            self._behind.remove(name)
            self._take_back(name)

    def _restart(self, name: str, error: EngineError) -> None:
        self.check_trainers()  # an engine on the memory of a dead trainer refuses to serve, and is not the one to mend
        if self._restarts[name] >= self._config.engine.restarts:
            if self._restarts[name]:
                error.add_note(f"{name} was started again {self._restarts[name]} times before (engine.restarts)")
            raise error
        self._restarts[name] += 1
        first_line = str(error).strip().splitlines()[0]
        logger.error("%s is started again: %s", name, error)
        self._note(f"{name} is started again ({self._restarts[name]} of {self._config.engine.restarts}): {first_line}")
        began = time.monotonic()
        fetch(self._rollout.engine_lost.remote(name), name=_ROLLOUT, doing="let go of an engine", deadline_s=60.0)
        limit = self._config.engine.start_deadline_s + GRACE_S
        start = self._engines[name].restart.remote()
        address: EngineAddress = fetch(start, name=name, doing="start again", deadline_s=limit)
        self._session.replace(self._addresses[name].url, address.url)
        self._addresses[name] = address
        self._behind.append(name)
        self._asked.clear()
        logger.info("%s serves again at %s after %.1f s", name, address.url, time.monotonic() - began)

    def _take_back(self, name: str) -> None:
        back = self._rollout.engine_back.remote(self._addresses[name], self._session.served)
        fetch(back, name=_ROLLOUT, doing="take an engine back", deadline_s=60.0)
        self._asked.pop(_ROLLOUT, None)  # an answer from before this names the engine as lost, and it is not any more
