"""The parent side of a worker reward: a few worker processes, each of which grades one payload at a time.

A worker that passes its time-out is ended by its own timer (``worker.py``) and replaced for the next payload; the
payload scores 0 with that reason. Time spent waiting for a free worker is not counted against a payload.

Most graders take microseconds, and handing one payload to a process and its answer back takes ten times that. So what
waits is handed over in batches, as large as a worker has lately graded in a few milliseconds: payloads that take longer
than that go one at a time, to whichever worker is free.

Everything happens in the event loop that waits for the scores; a reward that is used in several, one after the other or
side by side, has workers for each, and those of a loop that is closed go over to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import TIMEOUT_REASON, Score, checked, name_of
from vime_rollout.rewards.process import GradingProcess, WorkerGoneError
from vime_rollout.sample import Sample

#: How long a batch should take at most, and what is too little to be shared among workers.
_BATCH_S, _SHARED_S = 0.005, 0.001
#: Most bytes of a batch. A pipe holds more, so writing one does not wait for the worker.
_BATCH_BYTES = 32768

MakePayload = Callable[[Sample], dict[str, Any]]
_Outcome = Score | Exception


class _Call:
    """Payloads that somebody waits for together: a future for each would cost more than grading most of them.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        """Belong to the running event loop, which alone may settle it."""
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.at: int | None = None  # whose turn it is, or whose error ended the wait
        self._told: list[tuple[Score, float] | None] = [None] * count
        self._left = count
        if not count:
            self.done.set_result(None)

    def settle(self, position: int, outcome: _Outcome, now: float) -> None:
        """Take in what became of one payload."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.at = position
            self.done.set_exception(outcome)
            return
        self._told[position] = outcome, now
        self._left -= 1
        if not self._left:
            self.done.set_result(None)

    def told(self) -> list[tuple[Score, float]]:
        """Return the scores, and when each was there, once the wait is over."""
        return [told for told in self._told if told is not None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A payload of a call."""

    payload: Mapping[str, Any]
    line: bytes
    call: _Call
    position: int


@dataclass(frozen=True, slots=True)
class _Terms:
    """What all crews of a reward have in common."""

    name: str
    grader: str
    timeout_s: float
    workers: int

    def closed(self) -> RewardError:
        return RewardError("reward is closed", where=f"reward {self.name}")


class _Crew:
    """The workers of one event loop, and what waits for them there.

    Args:
        terms: Of the reward.
        loop: The running one.
        idle: Workers that a closed loop has left.
    """

    def __init__(self, terms: _Terms, loop: asyncio.AbstractEventLoop, idle: list[GradingProcess]) -> None:
        """Take the workers over, and start no other before it is needed."""
        self.loop, self.idle = loop, idle
        self.busy: set[GradingProcess] = set()
        self.waiting: deque[_Asked] = deque()
        self.seconds = _BATCH_S  # of one payload, lately
        self._terms = terms
        self._drains: set[asyncio.Task[None]] = set()
        self._closed = False
        for worker in idle:
            worker.move_to(loop)

    def ask(self, asked: Sequence[_Asked]) -> None:
        """Have payloads graded, in order."""
        self.waiting.extend(asked)
        wanted = -(-len(self.waiting) // self._sizes()[0])
        for _ in range(min(wanted, self._terms.workers) - len(self._drains)):
            task = self.loop.create_task(self._drain())
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)

    async def _drain(self) -> None:
        """Grade batch after batch until nothing waits."""
        task = asyncio.current_task()
        assert task is not None, "started as one"
        try:
            while batch := self._next_batch():
                outcomes = await self._outcomes(batch)
                now = time.monotonic()
                for asked, outcome in zip(batch, outcomes, strict=True):
                    asked.call.settle(asked.position, outcome, now)
        finally:
            self._drains.discard(task)  # now: what is asked for before the task counts as done needs another

    def _sizes(self) -> tuple[int, int]:
        """Return how many payloads are too few to be shared among workers, and the most of a batch."""
        seconds = max(self.seconds, 1e-6)
        return max(1, int(_SHARED_S / seconds)), max(1, int(_BATCH_S / seconds))

    def _next_batch(self) -> list[_Asked]:
        batch: list[_Asked] = []
        least, most = self._sizes()
        most, size = min(most, max(least, -(-len(self.waiting) // self._terms.workers))), 0
        while self.waiting and len(batch) < most:
            asked = self.waiting[0]
            size += len(asked.line)
            if batch and size > _BATCH_BYTES:
                break
            self.waiting.popleft()
            if not asked.call.done.done():
                batch.append(asked)
        return batch

    async def _outcomes(self, batch: Sequence[_Asked]) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        began = time.monotonic()
        try:
            while len(outcomes) < len(batch):
                outcomes += await self._grade(batch[len(outcomes) :])
        except Exception as error:  # noqa: BLE001 - the edge of a task: raised where the scores are waited for
            outcomes += [error] * (len(batch) - len(outcomes))
        self.seconds += ((time.monotonic() - began) / len(batch) - self.seconds) / 2
        return outcomes

    async def _grade(self, batch: Sequence[_Asked]) -> list[_Outcome]:
        """Return the outcomes of the first payloads of a batch, at least of one: a worker that ends leaves the rest."""
        name, limit = self._terms.name, self._terms.timeout_s
        worker = await self._worker()
        try:
            answers, gone = await worker.ask([asked.line for asked in batch], limit)
        except BaseException:
            self._discard(worker)  # it may be in the middle of something
            raise
        outcomes: list[_Outcome] = [
            RewardError("grader failed", where=f"reward {name}", seen=answer["error"])
            if "error" in answer
            else Score(answer["value"], answer["reason"])
            for answer in answers
        ]
        if gone is None and not self._closed:
            self.busy.discard(worker)
            self.idle.append(worker)
            return outcomes
        self._discard(worker)
        if len(outcomes) == len(batch):  # it ended with all of its work done; the next one gets what comes next
            return outcomes
        if self._closed or gone is None:
            raise self._terms.closed()
        if gone.timed_out:
            return [*outcomes, Score(0.0, f"{TIMEOUT_REASON} after {limit:g} s")]
        seen = f"exit code {gone.code}, payload {batch[len(outcomes)].payload}"
        return [*outcomes, RewardError("reward worker died", where=f"reward {name}", seen=seen)]

    async def _worker(self) -> GradingProcess:
        """Return an idle worker, or a new one when it is ready; it is busy from now on."""
        while self.idle:
            worker = self.idle.pop()
            self.busy.add(worker)
            if not worker.ended:
                return worker
            self._discard(worker)
        if self._closed:
            raise self._terms.closed()
        worker = GradingProcess(self._terms.grader)
        self.busy.add(worker)
        worker.move_to(self.loop)
        try:
            await worker.until_ready()
        except BaseException as error:
            self._discard(worker)
            if not isinstance(error, WorkerGoneError):
                raise
            if self._closed:
                raise self._terms.closed() from None
            where, seen = f"reward {self._terms.name}", f"exit code {error.code}"
            raise RewardError("reward worker does not start", where=where, seen=seen) from None
        return worker

    def _discard(self, worker: GradingProcess) -> None:
        self.busy.discard(worker)
        worker.end()
        worker.release()

    def leave(self) -> list[GradingProcess]:
        """Return the idle workers of a loop that is closed, and end the others."""
        for worker in list(self.busy):
            self._discard(worker)
        idle, self.idle = self.idle, []
        return idle

    def close(self) -> None:
        """End the workers, from any thread; what waits is cancelled in the loop."""
        self._closed = True
        for worker in [*self.idle, *self.busy]:
            worker.end()
        try:
            here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            here = False
        if here or not self.loop.is_running():
            self._let_go()
        else:
            _tell(self.loop, self._let_go)

    def _let_go(self) -> None:
        left = self.idle if self.loop.is_running() else [*self.idle, *self.busy]  # else their tasks release them
        for worker in left:
            worker.release()
        self.idle.clear()
        for call in {asked.call for asked in self.waiting}:
            if not self.loop.is_closed():
                call.done.cancel()
        self.waiting.clear()


class WorkerReward:
    """A reward whose grader runs in worker processes.

    Args:
        name: For errors and reasons.
        grader: ``module:function`` that turns a JSON payload into (value, reason).
        payload: Makes the payload of a sample; may raise ``RewardError``.
        timeout_s: Seconds for one sample.
        workers: Number of processes; started when first needed.
    """

    def __init__(self, name: str, grader: str, payload: MakePayload, *, timeout_s: float, workers: int = 2) -> None:
        """Start no process yet."""
        self.name = name
        self._payload = payload
        self._terms = _Terms(name, grader, timeout_s, workers)
        self._lock = threading.Lock()  # of the two below
        self._crews: dict[asyncio.AbstractEventLoop, _Crew] = {}
        self._closed = False

    async def score(self, sample: Sample) -> Score:
        """Have a worker grade the sample.

        Raises:
            RewardError: When the grader fails, its worker cannot be started, or the reward is closed.
        """
        ((score, _),) = await self._scores([sample], _Call(1))
        return score

    async def score_together(self, samples: Sequence[Sample]) -> list[tuple[Score, float]]:
        """Have workers grade several samples, which costs less than asking for each.

        Args:
            samples: In any order.

        Returns:
            The score of each, and the seconds until it was there.

        Raises:
            RewardError: As ``score`` does for the first sample that fails, with a note that names it; the others are
                not waited for.
        """
        call = _Call(len(samples))
        try:
            return await self._scores(samples, call)
        except RewardError as error:
            if call.at is not None:
                error.add_note(name_of(samples[call.at]))
            raise

    async def _scores(self, samples: Sequence[Sample], call: _Call) -> list[tuple[Score, float]]:
        began, asked, scores = time.monotonic(), [], []
        try:
            for call.at, sample in enumerate(samples):
                payload = self._payload(sample)
                line = json.dumps({"timeout_s": self._terms.timeout_s, "payload": payload}) + "\n"
                asked.append(_Asked(payload, line.encode(), call, call.at))
            call.at = None
            self._crew().ask(asked)
            await call.done
            told = call.told()
            for call.at, (sample, (score, ended)) in enumerate(zip(samples, told, strict=True)):
                scores.append((checked(score, self.name, sample), ended - began))
        finally:
            call.done.cancel()  # what still waits is not graded
        return scores

    def _crew(self) -> _Crew:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise self._terms.closed()
            if loop not in self._crews:
                over = [self._crews.pop(other) for other in list(self._crews) if other.is_closed()]
                self._crews[loop] = _Crew(self._terms, loop, [worker for crew in over for worker in crew.leave()])
            return self._crews[loop]

    def close(self) -> None:
        """End the workers; what is not graded yet is cancelled."""
        with self._lock:
            self._closed = True
            crews, self._crews = list(self._crews.values()), {}
        for crew in crews:
            crew.close()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have an event loop make a call; one that is closed has nobody left who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
