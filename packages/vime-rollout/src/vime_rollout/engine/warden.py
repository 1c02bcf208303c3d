"""Starts one command and makes sure that nothing of it outlives its owner. Run as a script; standard library only.

An engine is a tree of processes (server, engine core, workers) that may put themselves into sessions of their own, and
its owner may end in any way, ``kill -9`` included. What runs this script becomes two processes::

    owner --- keeper --- warden --- command --- ...

The *warden* ends the tree; the *keeper* is what the owner sees as its child, and passes the exit code on. They are two
because of frameworks that kill the direct children of a worker when it ends (Ray does): then the keeper is killed, and
the warden, which is nobody's direct child, still does its work. These mechanisms make the end certain:

* the owner holds the write end of this script's stdin; when the owner is gone, however it went, the pipe reads
  end-of-file (should some fork of the owner keep it open, the keeper's change of parent tells the same);
* the warden ends the tree when the keeper is gone, and the keeper does when the warden is gone;
* both are *child subreapers* (prctl(2)): a process of the tree that loses its parent becomes a child of the nearest of
  them instead of init's, so a walk from there finds the whole tree at any time;
* the command gets a parent-death signal, in case both are killed at one time.

The end is polite first (SIGTERM to the command), forced after a grace period (SIGKILL to everything below). The owner
orders it by closing the pipe, or the forced end alone by writing ``FORCE`` before. Python's *resource trackers* are
spared at first: one ends by itself when the last process that uses it has, and removes what those have left in shared
memory (vLLM's workers talk through a quarter of a gigabyte of it). Then the tree's temporary folder is removed: what
was killed has left its sockets there. The exit code is the command's, or 128 + the signal that ended it.

Usage: ``python -P -S warden.py OWNER_PID GRACE_SECONDS TEMPORARY_FOLDER COMMAND [ARGUMENT ...]``
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
_KILLED = 128 + signal.SIGKILL
_SHM = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, not a temporary file
#: Seconds that a resource tracker gets to remove what the others have left; it takes milliseconds.
_TRACKER_S = 5.0
#: What ``multiprocessing.resource_tracker`` starts itself with.
_TRACKER = b"multiprocessing.resource_tracker"
#: Written to stdin by an owner that wants no polite end.
FORCE = b"k"


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


def kill(processes: list[int], *, spare_trackers: bool) -> None:
    """Kill processes, all but Python's resource trackers where these are to be spared."""
    for pid in processes:
        if not (spare_trackers and _is_tracker(pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


def clear(root: int) -> None:
    """Kill everything below ``root``, this process, until nothing is left."""
    deadline = time.monotonic() + _TRACKER_S
    while below := descendants(root):
        kill(below, spare_trackers=time.monotonic() < deadline)
        reap()
        time.sleep(0.02)
    reap()


def meetings(folder: Path) -> list[str]:
    """Return the names of the files by which an engine's workers found each other.

    On a CPU they also share memory under such a name, which vLLM never removes and no tracker knows.
    """
    return [path.name for path in folder.glob("vllm_dist_*")]


def remove(folder: Path, met: Iterable[str] = ()) -> None:
    """Remove the tree's temporary folder, once nobody is left who writes to it; what cannot be removed is told.

    Args:
        folder: The folder.
        met: Names from ``meetings`` whose files may be gone; their shared memory is removed too.
    """
    for name in {*met, *meetings(folder)}:
        for segment in _SHM.glob(f"{name}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # keeper, warden and owner may be at it together
    if folder.exists():
        sys.stderr.write(f"the temporary folder of an engine stays behind: {folder}\n")


def reap() -> dict[int, int]:
    """Collect all ended children (adopted ones too) and return their exit codes by process id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


class Warden:
    """Watches one command; see the module's docstring.

    Args:
        command: What to run.
        grace_s: Seconds between SIGTERM and SIGKILL.
        scratch: The tree's temporary folder.
        keeper: Process id of the keeper.
    """

    def __init__(self, command: list[str], grace_s: float, scratch: Path, keeper: int) -> None:
        """Become a subreaper and start the command."""
        self._keeper = keeper
        self._scratch = scratch
        self._grace_s = grace_s
        self._stop = False
        self._code: int | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._child = subprocess.Popen(  # noqa: S603 - the command is the owner's
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # safe: one thread only
        )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True

    def run(self) -> int:
        """Wait for the command or for an order to end it, clear the tree, and return the exit code."""
        while self._look() is None and not self._stop and not self._ordered():
            pass
        met = meetings(self._scratch)  # a polite end removes the files
        if self._code is None and self._grace_s > 0:
            self._child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self._grace_s
            while self._look() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        clear(os.getpid())
        remove(self._scratch, met)
        return _KILLED if self._code is None else self._code

    def _ordered(self) -> bool:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and os.read(0, 1) == FORCE:
            self._grace_s = 0.0
        return bool(readable) or os.getppid() != self._keeper

    def _look(self) -> int | None:
        self._code = reap().get(self._child.pid, self._code)
        return self._code


class Keeper:
    """The owner's direct child: starts the warden and answers for it; see the module's docstring.

    Args:
        owner: Process id of the owner, told by itself: it may be gone already.
        command: What to run.
        grace_s: Seconds between SIGTERM and SIGKILL.
        scratch: The tree's temporary folder.
    """

    def __init__(self, owner: int, command: list[str], grace_s: float, scratch: Path) -> None:
        """Become a subreaper and fork the warden."""
        self._owner = owner
        self._scratch = scratch
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's affair; it ends us when it wants
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        keeper = os.getpid()
        self._warden = os.fork()
        if self._warden == 0:
            _exit(lambda: Warden(command, grace_s, scratch, keeper).run())
        signal.signal(signal.SIGTERM, self._pass_on)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        try:
            os.kill(self._warden, number)
        except ProcessLookupError:
            return

    def run(self) -> int:
        """Wait for the warden, clear what it left should it have been killed, and return the exit code."""
        code = None
        while code is None:
            code = reap().get(self._warden)
            if code is None:
                time.sleep(_POLL_S / 4)
                if os.getppid() != self._owner:
                    self._pass_on(signal.SIGTERM, None)
        clear(os.getpid())
        remove(self._scratch)
        return code


def _exit(run: Callable[[], int]) -> NoReturn:
    """End this process with what ``run`` returns, never returning into the code of the process it was forked from."""
    code = 1
    try:
        code = run()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Run keeper and warden for the command in ``sys.argv``."""
    owner, grace_s, scratch, *command = sys.argv[1:]
    return Keeper(int(owner), command, float(grace_s), Path(scratch)).run()


if __name__ == "__main__":
    sys.exit(main())
