"""A child process that speaks JSON lines, with a deadline on every answer."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self, cast

from vime_devices.errors import ProbeError

GRACE_S = 5.0


class Channel:
    """Start a child and talk with it; leaving the context ends it, whatever state it is in.

    Args:
        command: The child's command line.
        environ: Its environment.
        name: What to call it in errors.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], name: str) -> None:
        """Start the child and the threads that drain it."""
        self.name = name
        self._process = subprocess.Popen(  # noqa: S603 - the command is this package's own worker
            list(command),
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stdin, self._stdout, self._stderr = (
            cast(IO[str], pipe) for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        drains = (self._keep_lines, self._keep_errors)
        self._threads = [threading.Thread(target=drain, daemon=True) for drain in drains]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        """Return the channel."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the child: by closing its input, then by force."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with something unread
            self._stdin.close()
        try:
            self._process.wait(GRACE_S if error is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(GRACE_S)
        for thread in self._threads:
            thread.join(GRACE_S)
        self._stdout.close()
        self._stderr.close()

    def send(self, **message: Any) -> None:
        """Send one object.

        Args:
            **message: Its fields.

        Raises:
            ProbeError: The child has ended.
        """
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """Wait for one object.

        Args:
            deadline_s: Seconds to wait.

        Returns:
            The object.

        Raises:
            TimeoutError: Nothing came in time.
            ProbeError: The child ended, or said something else than an object.
        """
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty as error:
            raise TimeoutError(f"{self.name} said nothing for {deadline_s:g} s") from error
        if line is None:
            raise self._ended()
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            message = None
        if not isinstance(message, dict):
            raise ProbeError(
                "a probe process broke the protocol",
                where=self.name,
                seen=repr(line[:200]),
                expected="one JSON object a line",
                fix="run the worker by hand (python -m vime_devices.probe.worker import) to see who prints",
            )
        return message

    def _ended(self) -> ProbeError:
        try:
            status = str(self._process.wait(GRACE_S))
        except subprocess.TimeoutExpired:
            status = "still running with its output closed"
        self._threads[1].join(GRACE_S)
        last = next((line for line in reversed(self._errors) if line.strip()), "nothing on stderr").strip()
        return ProbeError(
            "a probe process ended early",
            where=self.name,
            seen=f"exit status {status}: {last}",
            expected="an answer",
            fix="run the worker by hand (python -m vime_devices.probe.worker import) under the same mask",
        )

    def _keep_lines(self) -> None:
        for line in self._stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _keep_errors(self) -> None:
        self._errors.extend(self._stderr)
