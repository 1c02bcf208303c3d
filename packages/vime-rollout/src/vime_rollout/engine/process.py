"""The process tree of one engine, seen from its owner: start, watch, read the log, end.

The tree is started below a *keeper* and a *warden* (``warden.py``), which end it when this process is gone for any
reason. What is left to do here is the ordinary end, and sweeping up should both have been killed: the tree shares their
session, so its members are found by session id.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from vime_rollout.engine import warden
from vime_rollout.engine.scratch import make_scratch
from vime_rollout.errors import EngineError

_TAIL_BYTES = 256 * 1024
#: One traceback a request follows the one that matters, so the cause may stand far above the tail.
_CAUSE_BYTES = 32 * 1024 * 1024
_POLL_S = 0.05
#: A line that ends a traceback, wherever a logger's prefix put it.
_ERROR_LINE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit): .+)$")
#: Errors that only report that another process failed first.
_SECONDARY = ("See root cause above", "EngineDeadError", "Engine core initialization failed", "AsyncLLM failed")


class EngineProcess:
    """One command under keeper and warden, with its output in a log file and a temporary folder of its own.

    Args:
        command: What to run.
        environment: Its whole environment, less what ``make_scratch`` puts into it.
        log_path: Where stdout and stderr go; appended to, so that a restart keeps the history.
        grace_s: Seconds between the polite and the forced end.
        name: Name of the engine, for errors.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, *, grace_s: float, name: str
    ) -> None:
        """Start the command.

        Raises:
            EngineStartError: When there can be no temporary folder for it.
        """
        self.log_path = log_path
        self._name = name
        self._grace_s = grace_s
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch, environment = make_scratch(environment, name=name)
        guard = [sys.executable, "-P", "-S", warden.__file__, str(os.getpid())]
        wrapped = [*guard, str(grace_s), str(self._scratch), *command]
        try:
            with log_path.open("ab") as log:
                self._log_start = log.tell()
                self._keeper = subprocess.Popen(  # noqa: S603 - the command is the caller's
                    wrapped, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
        except OSError:
            self._scratch.rmdir()
            raise

    @property
    def pid(self) -> int:
        """Process id of the keeper, which is also the session id of the tree."""
        return self._keeper.pid

    @property
    def scratch(self) -> Path:
        """The tree's temporary folder; gone once the tree is."""
        return self._scratch

    def poll(self) -> int | None:
        """Return the exit code once the command has ended, else ``None``."""
        code = self._keeper.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, deadline_s: float) -> int | None:
        """Wait for the end; return the exit code, or ``None`` when the deadline passed first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(deadline_s)
        return self.poll()

    def members(self) -> list[int]:
        """Return the ids of all living processes of the tree, keeper and warden included."""
        session = self._keeper.pid
        alive = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                    alive.append(process.pid)
            except (ProcessLookupError, PermissionError):  # it ended meanwhile, or is another user's
                continue
        return sorted({*alive, *warden.descendants(session)})

    def stop(self, *, forced: bool = False) -> int:
        """End the whole tree, and return the exit code. Safe to call again.

        Args:
            forced: Kill at once, for a tree that hangs; else it is asked politely first.

        Raises:
            EngineError: When a process survives SIGKILL (it hangs in the kernel); names the processes.
        """
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                if forced:
                    self._keeper.stdin.write(warden.FORCE)
                self._keeper.stdin.close()  # the warden takes this as its order to end the tree
        polite = time.monotonic() + 5.0 + (0.0 if forced else self._grace_s)
        self.wait(polite - time.monotonic())
        deadline = polite + 10.0
        while members := self.members():
            if time.monotonic() > deadline:
                raise EngineError(
                    "processes of an engine survive SIGKILL",
                    where=f"engine {self._name}",
                    seen=f"processes {members}",
                    fix="look at their kernel stacks (/proc/PID/stack); the device driver may hang",
                )
            late = time.monotonic() > polite
            if late or not any(map(_is_guard, members)):
                warden.kill(members, spare_trackers=not late)
            self._keeper.poll()
            time.sleep(_POLL_S)
        self._keeper.wait(5.0)
        warden.remove(self._scratch)  # for the case that both guards were killed
        code = self.poll()
        assert code is not None, "it was waited for"
        return code

    def forget_log(self) -> None:
        """Leave out what was logged so far when the end is described: it belongs to a start that succeeded."""
        self._log_start = self.log_path.stat().st_size

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines that this start has written to the log."""
        return "\n".join(self._recent_log(_TAIL_BYTES).splitlines()[-lines:])

    def log_cause(self) -> str:
        """Return the error line that most likely ended the process, or an empty string."""
        primary = secondary = ""
        for line in self._recent_log(_CAUSE_BYTES).splitlines():
            if match := _ERROR_LINE.search(line):
                if any(mark in line for mark in _SECONDARY):
                    secondary = match.group(1)
                else:
                    primary = match.group(1)
        return primary or secondary

    def describe_end(self, code: int) -> str:
        """Return exit code, cause and log tail as one text."""
        signal_text = f" ({signal.Signals(code - 128).name})" if 128 < code < 128 + signal.NSIG else ""
        cause = self.log_cause()
        head = f"exit code {code}{signal_text}" + (f", {cause}" if cause else "")
        return f"{head}; last lines of {self.log_path}:\n{self.log_tail()}"

    def _recent_log(self, most: int) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - most))
            return log.read().decode(errors="replace")


def _is_guard(pid: int) -> bool:
    """Tell whether the process is a keeper or a warden, which ends the tree better than anybody else can."""
    try:
        return str(Path(warden.__file__)) in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
