"""Starts one command and makes sure that nothing of it outlives its owner. Run as a script; standard library only.

An engine is a tree of processes (server, engine core, workers) that may put themselves into sessions of their own, and
its owner may end in any way, ``kill -9`` included. Three mechanisms make the end certain:

* the owner holds the write end of this process's stdin and never writes; when the owner is gone, however it went, the
  pipe reads end-of-file (should some fork of the owner keep it open, the change of parent tells the same);
* this process is a *child subreaper* (prctl(2)): a process of the tree that loses its parent becomes a child of the
  warden instead of init's, so a walk from here finds the whole tree at any time;
* the command gets a parent-death signal, in case the warden itself is killed.

The end is polite first (SIGTERM to the command), forced after a grace period (SIGKILL to everything below). The exit
code is the command's, or 128 + the signal that ended it.

Usage: ``python -P -S warden.py GRACE_SECONDS COMMAND [ARGUMENT ...]``
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below ``root``, parents first, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name (second field) may hold spaces and parentheses: read from after the last one.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # it ended between the listing and the reading
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


class Warden:
    """Watches one command; see the module's docstring.

    Args:
        command: What to run.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, command: list[str], grace_s: float) -> None:
        """Become a subreaper and start the command."""
        self._owner = os.getppid()
        self._grace_s = grace_s
        self._stop = False
        self._code: int | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's affair; it ends us when it wants
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._child = subprocess.Popen(  # noqa: S603 - the command is the owner's
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # safe: one thread only
        )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True

    def run(self) -> int:
        """Wait for the command or for the owner's end, clear the tree, and return the exit code."""
        while self._reap() is None and not self._stop and not self._owner_gone():
            pass
        if self._code is None:
            self._child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self._grace_s
            while self._reap() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._clear()
        return self._code if self._code is not None else 128 + signal.SIGKILL

    def _owner_gone(self) -> bool:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        return bool(readable) or os.getppid() != self._owner

    def _reap(self) -> int | None:
        """Collect ended children (adopted ones too) and return the command's exit code once it is known."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self._code
            if pid == 0:
                return self._code
            if pid == self._child.pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else 128 - code

    def _clear(self) -> None:
        while below := descendants(os.getpid()):
            for pid in below:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap()
            time.sleep(0.02)
        self._reap()


def main() -> int:
    """Run the warden for the command in ``sys.argv``."""
    return Warden(sys.argv[2:], float(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
