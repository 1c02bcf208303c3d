"""One worker process, as its parent's event loop sees it; ``worker.py`` is the other side.

Answers are lines of a file in memory that both sides have open, so what a worker wrote is there when it is gone, and
nobody is woken before a whole batch is graded: being woken costs more than grading most payloads does. A byte says that
a batch is done. No thread waits for it: it would have to wait for the interpreter's lock, again after each call of
the system, while the event loop makes samples of the next answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_START_S = 120.0
#: How long after its timer a worker may take to be gone before it is killed from here.
_GRACE_S = 5.0


class WorkerGoneError(Exception):
    """The worker ended, or did not answer in time.

    Args:
        code: Its exit code, if it ended.
        timed_out: Whether its payload took too long.
    """

    def __init__(self, code: int | None, *, timed_out: bool) -> None:
        """Keep both."""
        super().__init__(code)
        self.code = code
        self.timed_out = timed_out


class GradingProcess:
    """A worker process; every call but ``end`` belongs to the thread of the loop that it was moved to last.

    Args:
        grader: ``module:function``.
    """

    def __init__(self, grader: str) -> None:
        """Start it, and do not wait until it is ready."""
        self._answers = os.fdopen(os.memfd_create("answers"), "rb", buffering=0)
        self._file = self._answers.fileno()
        command = [sys.executable, "-m", "vime_rollout.rewards.worker", grader, str(self._file)]
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._file,),
        )
        assert self._process.stdin is not None, "opened with a pipe"
        assert self._process.stdout is not None, "opened with a pipe"
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._released = False
        self.ended = False

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be listened to by a loop from now on; the one before, if any, is closed."""
        self._loop = loop
        loop.add_reader(self._stdout, self._heard)

    async def until_ready(self) -> None:
        """Wait until it has imported its grader.

        Raises:
            WorkerGoneError: It ended instead, or takes too long.
        """
        await self._until_told(_START_S)

    async def ask(
        self, lines: Sequence[bytes], timeout_s: float
    ) -> tuple[list[dict[str, Any]], WorkerGoneError | None]:
        """Have payloads graded, each within its own time.

        Args:
            lines: A payload each.
            timeout_s: What the lines say.

        Returns:
            The answers, and why they are fewer than the lines if they are: the worker is of no use then.
        """
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)  # of the worker, too: it has the same open file
        gone = None
        try:
            await self._send(b"".join(lines) + b"\n", timeout_s + _GRACE_S)
            await self._until_told(timeout_s + _GRACE_S)
        except WorkerGoneError as error:
            gone = error
        whole, _, _ = os.pread(self._file, self._written(), 0).rpartition(b"\n")
        return json.loads(b"[" + whole.replace(b"\n", b",") + b"]"), gone

    async def _send(self, text: bytes, limit: float) -> None:
        assert self._loop is not None, "moved to a loop"
        left = memoryview(text)
        while left:
            try:
                left = left[os.write(self._stdin, left) :]
            except BlockingIOError:  # one payload is larger than a pipe
                room = self._loop.create_future()
                self._loop.add_writer(self._stdin, _settle, room)
                try:
                    await asyncio.wait_for(room, limit)
                except TimeoutError:
                    raise WorkerGoneError(None, timed_out=True) from None
                finally:
                    self._loop.remove_writer(self._stdin)
            except BrokenPipeError:
                raise await self._gone() from None

    async def _until_told(self, limit: float) -> None:
        """Wait for the worker to say that it is ready or done with a batch, as long as it answers now and then."""
        assert self._loop is not None, "moved to a loop"
        if not self.ended:
            self._told = self._loop.create_future()
            self._timer = self._loop.call_later(limit, self._look, limit, self._written())
            try:
                await self._told
            finally:
                self._timer.cancel()
                self._told = None
        if self.ended:
            raise await self._gone()

    def _heard(self) -> None:
        """Take in what the worker's pipe says: a byte that it is done, or its end."""
        if not os.read(self._stdout, 16):
            self.ended = True
            assert self._loop is not None, "a loop has called this"
            self._loop.remove_reader(self._stdout)
        if self._told is not None:
            _settle(self._told)

    def _look(self, limit: float, before: int) -> None:
        """Give up on a worker that has graded nothing since ``limit`` seconds."""
        assert self._told is not None, "cancelled with the wait"
        assert self._loop is not None, "a loop has called this"
        written = self._written()
        if written != before:
            self._timer = self._loop.call_later(limit, self._look, limit, written)
        elif not self._told.done():
            self._told.set_exception(WorkerGoneError(None, timed_out=True))

    async def _gone(self) -> WorkerGoneError:
        try:
            code = await asyncio.to_thread(self._process.wait, _GRACE_S)
        except subprocess.TimeoutExpired:  # it closed its pipes and lives on
            return WorkerGoneError(None, timed_out=False)
        return WorkerGoneError(code, timed_out=code == -signal.SIGALRM)

    def _written(self) -> int:
        return os.fstat(self._file).st_size

    def end(self) -> None:
        """Kill it; from any thread."""
        self._process.kill()
        self._process.wait(_GRACE_S)

    def release(self) -> None:
        """Close the pipes of a worker that was ended."""
        if self._released:
            return
        self._released = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._stdout)
        for stream in (self._process.stdin, self._process.stdout, self._answers):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what the dead worker did not read is of no use
                    stream.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
