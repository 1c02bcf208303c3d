"""The parent side of a worker reward: a few worker processes, each of which grades one payload at a time.

A worker that passes its time-out is ended by its own timer (``worker.py``) and replaced for the next payload; the
payload scores 0 with that reason. Time spent waiting for a free worker is not counted against a payload.

Most graders take microseconds, and handing one payload to a process and its answer back takes ten times that. So what
waits is handed over in batches, as large as a worker has lately graded in a few milliseconds: payloads that take longer
than that go one at a time, to whichever worker is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import TIMEOUT_REASON, Score, checked, name_of
from vime_rollout.sample import Sample

_START_S = 120.0
#: How long after its timer a worker may take to be gone before it is killed from here.
_GRACE_S = 5.0
#: How long a batch should take at most, and what is too little to be shared among workers: each batch wakes two
#: threads and a process.
_BATCH_S, _SHARED_S = 0.005, 0.001
#: Most bytes of a batch. A pipe holds more, so writing one never waits for a worker that waits to be read from.
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
        self._grader = grader
        self._payload = payload
        self._timeout_s = timeout_s
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"reward-{name}")
        self._local = threading.local()
        self._lock = threading.Lock()  # of all below
        self._live: set[_Worker] = set()
        self._waiting: deque[_Asked] = deque()
        self._draining = 0
        self._seconds = _BATCH_S  # of one payload, lately
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
                line = json.dumps({"timeout_s": self._timeout_s, "payload": payload}) + "\n"
                asked.append(_Asked(payload, line.encode(), call, call.at))
            call.at = None
            self._ask(asked)
            await call.done
            told = call.told()
            for call.at, (sample, (score, ended)) in enumerate(zip(samples, told, strict=True)):
                scores.append((checked(score, self.name, sample), ended - began))
        finally:
            call.done.cancel()  # what still waits is not graded
        return scores

    def _ask(self, asked: Sequence[_Asked]) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._waiting.extend(asked)
            for _ in range(min(self._workers - self._draining, len(asked))):
                self._draining += 1
                self._threads.submit(self._drain)

    def close(self) -> None:
        """End the workers; what is not graded yet is cancelled."""
        with self._lock:
            self._closed = True
            workers, self._live = self._live, set()
            left, self._waiting = list(self._waiting), deque()
        for worker in workers:
            worker.end()
        self._threads.shutdown(wait=True)
        for worker in workers:  # only now: a thread may have been reading from its pipe
            worker.release()
        for call in {asked.call for asked in left}:
            _tell(call.loop, call.done.cancel)

    def _drain(self) -> None:
        """Grade batch after batch until nothing waits; runs in a thread, which has a worker of its own."""
        while batch := self._next_batch():
            outcomes: list[_Outcome] = []
            began = time.monotonic()
            try:
                while len(outcomes) < len(batch):
                    outcomes += self._grade(batch[len(outcomes) :])
            except Exception as error:  # noqa: BLE001 - the edge of a thread: raised where the scores are waited for
                outcomes += [error] * (len(batch) - len(outcomes))
            with self._lock:
                self._seconds += ((time.monotonic() - began) / len(batch) - self._seconds) / 2
            pairs = list(zip(batch, outcomes, strict=True))
            for loop in {asked.call.loop for asked in batch}:
                _tell(loop, _settle, [pair for pair in pairs if pair[0].call.loop is loop])

    def _next_batch(self) -> list[_Asked]:
        batch: list[_Asked] = []
        with self._lock:
            seconds = max(self._seconds, 1e-6)
            share = max(-(-len(self._waiting) // self._workers), int(_SHARED_S / seconds))
            most, size = min(share, max(1, int(_BATCH_S / seconds))), 0
            while self._waiting and len(batch) < most:
                asked = self._waiting[0]
                size += len(asked.line)
                if batch and size > _BATCH_BYTES:
                    break
                self._waiting.popleft()
                if not asked.call.done.done():
                    batch.append(asked)
            if not batch:
                self._draining -= 1
        return batch

    def _grade(self, batch: Sequence[_Asked]) -> list[_Outcome]:
        """Return the outcomes of the first payloads of a batch, at least of one: a worker that ends leaves the rest."""
        worker = self._worker()
        outcomes: list[_Outcome] = []
        try:
            for answer in worker.ask([asked.line for asked in batch], self._timeout_s):
                if "error" in answer:
                    error = RewardError("grader failed", where=f"reward {self.name}", seen=answer["error"])
                    outcomes.append(error)
                else:
                    outcomes.append(Score(answer["value"], answer["reason"]))
        except _WorkerGoneError as gone:
            self._discard(worker)
            if len(outcomes) == len(batch):  # it ended with all of its work done; the next one gets what comes next
                return outcomes
            if gone.timed_out:
                outcomes.append(Score(0.0, f"{TIMEOUT_REASON} after {self._timeout_s:g} s"))
            else:
                seen = f"exit code {gone.code}, payload {batch[len(outcomes)].payload}"
                outcomes.append(RewardError("reward worker died", where=f"reward {self.name}", seen=seen))
        return outcomes

    def _closed_error(self) -> RewardError:
        return RewardError("reward is closed", where=f"reward {self.name}")

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is not None:
            return worker
        worker = _Worker(self._grader)
        with self._lock:
            if self._closed:
                worker.end()
                worker.release()
                raise self._closed_error()
            self._live.add(worker)
        self._local.worker = worker
        try:
            worker.until_ready()
        except _WorkerGoneError as gone:
            self._discard(worker)
            raise RewardError(
                "reward worker does not start", where=f"reward {self.name}", seen=f"exit code {gone.code}"
            ) from None
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.end()
        worker.release()
        self._local.worker = None
        with self._lock:
            self._live.discard(worker)


class _WorkerGoneError(Exception):
    """The worker ended instead of answering."""

    def __init__(self, code: int | None, *, timed_out: bool) -> None:
        super().__init__(code)
        self.code = code
        self.timed_out = timed_out


class _Worker:
    """One worker process.

    Its answers are lines of a file in memory that both have open, so what it wrote is there when it is gone, and nobody
    is woken before a whole batch is graded: being woken costs more than most payloads do.
    """

    def __init__(self, grader: str) -> None:
        self._answers = os.fdopen(os.memfd_create("answers"), "rb", buffering=0)
        self._file = self._answers.fileno()
        command = [sys.executable, "-m", "vime_rollout.rewards.worker", grader, str(self._file)]
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._file,),
        )

    def until_ready(self) -> None:
        self._until_told(_START_S)

    def ask(self, lines: Sequence[bytes], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the answers to payloads, each graded within its own time."""
        stdin = self._process.stdin
        assert stdin is not None, "opened with a pipe"
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)  # of the worker, too: it has the same open file
        try:
            stdin.write(b"".join(lines) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise _WorkerGoneError(self._process.wait(_GRACE_S), timed_out=False) from None
        gone = None
        try:
            self._until_told(timeout_s + _GRACE_S)
        except _WorkerGoneError as error:
            gone = error
        whole, _, _ = os.pread(self._file, self._written(), 0).rpartition(b"\n")
        yield from json.loads(b"[" + whole.replace(b"\n", b",") + b"]")
        if gone is not None:
            raise gone

    def _written(self) -> int:
        return os.fstat(self._file).st_size

    def _until_told(self, limit: float) -> None:
        """Wait for the worker to say that it is ready or done with a batch, as long as it answers now and then."""
        stdout = self._process.stdout
        assert stdout is not None, "opened with a pipe"
        written = self._written()
        while not select.select([stdout], [], [], limit)[0]:
            if self._written() == written:
                raise _WorkerGoneError(None, timed_out=True)
            written = self._written()
        if not os.read(stdout.fileno(), 1):
            code = self._process.wait(_GRACE_S)
            raise _WorkerGoneError(code, timed_out=code == -signal.SIGALRM)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(_GRACE_S)

    def release(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._answers):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what the dead worker did not read is of no use
                    stream.close()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Have an event loop make a call; one that is closed has nobody left who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


def _settle(pairs: Sequence[tuple[_Asked, _Outcome]]) -> None:
    now = time.monotonic()
    for asked, outcome in pairs:
        asked.call.settle(asked.position, outcome, now)
