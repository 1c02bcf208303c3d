"""The parent side of a worker reward: a few worker processes, each asked one payload at a time.

A worker that passes its time-out is ended by its own timer (``worker.py``) and replaced for the next payload; the
payload scores 0 with that reason. Time spent waiting for a free worker is not counted against a payload.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import TIMEOUT_REASON, Score, checked
from vime_rollout.sample import Sample

_START_S = 120.0
#: How long after its timer a worker may take to be gone before it is killed from here.
_GRACE_S = 5.0

MakePayload = Callable[[Sample], dict[str, Any]]


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
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"reward-{name}")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._live: set[_Worker] = set()
        self._closed = False

    async def score(self, sample: Sample) -> Score:
        """Have a worker grade the sample.

        Raises:
            RewardError: When the grader fails, or its worker cannot be started.
        """
        payload = self._payload(sample)
        loop = asyncio.get_running_loop()
        return checked(await loop.run_in_executor(self._threads, self._ask, payload), self.name, sample)

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._closed = True
            workers, self._live = self._live, set()
        for worker in workers:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:  # only now: a thread may have been reading from its pipe
            worker.release()

    def _ask(self, payload: Mapping[str, Any]) -> Score:
        worker = self._worker()
        try:
            answer = worker.ask(payload, self._timeout_s)
        except _WorkerGoneError as gone:
            self._discard(worker)
            if gone.timed_out:
                return Score(0.0, f"{TIMEOUT_REASON} after {self._timeout_s:g} s")
            raise RewardError(
                "reward worker died", where=f"reward {self.name}", seen=f"exit code {gone.code}, payload {payload}"
            ) from None
        if "error" in answer:
            raise RewardError("grader failed", where=f"reward {self.name}", seen=answer["error"])
        return Score(answer["value"], answer["reason"])

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is not None:
            return worker
        worker = _Worker(self._grader)
        with self._lock:
            if self._closed:
                worker.end()
                worker.release()
                raise RewardError("reward is closed", where=f"reward {self.name}")
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
    """One worker process."""

    def __init__(self, grader: str) -> None:
        command = [sys.executable, "-m", "vime_rollout.rewards.worker", grader]
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._buffer = b""

    def until_ready(self) -> None:
        self._read_line(_START_S)

    def ask(self, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        line = json.dumps({"timeout_s": timeout_s, "payload": payload}) + "\n"
        stdin = self._process.stdin
        assert stdin is not None, "opened with a pipe"
        try:
            stdin.write(line.encode())
            stdin.flush()
        except BrokenPipeError:
            raise _WorkerGoneError(self._process.wait(_GRACE_S), timed_out=False) from None
        answer: dict[str, Any] = json.loads(self._read_line(timeout_s + _GRACE_S))
        return answer

    def _read_line(self, limit: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None, "opened with a pipe"
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise _WorkerGoneError(None, timed_out=True)
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                code = self._process.wait(_GRACE_S)
                raise _WorkerGoneError(code, timed_out=code == -signal.SIGALRM)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        self._process.kill()
        self._process.wait(_GRACE_S)

    def release(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what the dead worker did not read is of no use
                    stream.close()
