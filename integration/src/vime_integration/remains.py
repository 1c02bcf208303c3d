"""Ends what is left of a Ray cluster when its driver is gone. Run as a script beside the driver.

Ray ties most of its processes to the driver, and its workers to the raylet. Its two agents per node (dashboard and
runtime environments) are tied to nothing: they notice that the raylet has died within 2 s, and then spend 60 s on
reporting that to a GCS which died with it. Somebody who starts a run again at once would find them in the way.

The script is given the processes of the cluster, each by id and start time, so that an id that was used again is never
mistaken. It waits until its stdin can be read from, which is when the driver says so or dies in any way, and kills
those that are still there. Should some fork of the driver keep the pipe open, the change of parent tells the same. Then
it removes the run's temporary folder: Ray kills its workers, and what they have there (Megatron-Core imports wandb,
which makes two folders) nobody else would remove.

Usage: ``python -P remains.py DRIVER_PID FOLDER PID:START_TIME ...``
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

POLL_S = 1.0
END_S = 10.0
#: How long workers may still be busy in the folder that is removed; they end within 3 s.
REMOVAL_S = 5.0
#: Start times are told on the wall clock, which may be set meanwhile.
CLOCK_S = 1.0


def started() -> list[psutil.Process]:
    """Return what this process has started by now and is still there, children of children too."""
    return psutil.Process().children(recursive=True)


@contextmanager
def end_with_the_driver(folder: Path, *, spare: Collection[psutil.Process] = ()) -> Iterator[None]:
    """Kill what this process has started by now, and is still there, at the end of the block or of this process.

    Args:
        folder: Removed then.
        spare: What it had started before, for other purposes.
    """
    ours = [process for process in started() if process not in spare and process.is_running()]
    names = [f"{process.pid}:{process.create_time()!r}" for process in ours]
    with subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, "-P", __file__, str(os.getpid()), str(folder), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the driver
    ) as guard:
        try:
            yield
        finally:
            assert guard.stdin is not None
            with suppress(BrokenPipeError):  # somebody has ended it
                guard.stdin.write(b"\n")  # for a fork may keep the pipe open
                guard.stdin.close()
            try:
                guard.wait(END_S)
            except subprocess.TimeoutExpired:
                logger.warning("%s is still there after %g s, and processes of Ray's may be", guard.args, END_S)
                guard.kill()


def _known(name: str) -> psutil.Process | None:
    pid, _, start = name.partition(":")
    try:
        process = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return None
    return process if abs(process.create_time() - float(start)) < CLOCK_S else None


def main(driver: int, folder: Path, names: list[str]) -> None:
    """Wait for the driver's end, then kill those of the named processes that are left, and remove the folder."""
    processes = [process for name in names if (process := _known(name)) is not None]
    while os.getppid() == driver:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
    for process in processes:
        try:
            process.kill()  # psutil looks at the start time again
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + REMOVAL_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)  # somebody may be putting something into it
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
