"""Ends what is left of a Ray cluster when its driver is gone. Run as a script beside the driver.

Ray ties most of its processes to the driver, and its workers to the raylet. Its two agents per node (dashboard and
runtime environments) are tied to nothing: they notice that the raylet has died within 2 s, and then spend 60 s on
reporting that to a GCS which died with it. Somebody who starts a run again at once would find them in the way.

The script is given the processes of the cluster, each by id and start time, so that an id that was used again is never
mistaken. It waits until its stdin ends, which is when the driver closes it or dies in any way, and kills those that are
still there. Should some fork of the driver keep the pipe open, the change of parent tells the same.

Usage: ``python -P remains.py PID:START_TIME ...``
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

POLL_S = 1.0
END_S = 10.0
#: Start times are told on the wall clock, which may be set meanwhile.
CLOCK_S = 1.0


@contextmanager
def end_with_the_driver() -> Iterator[None]:
    """Kill what this process has started by now, and is still there, at the end of the block or of this process."""
    started = psutil.Process().children(recursive=True)
    names = [f"{process.pid}:{process.create_time()!r}" for process in started if process.is_running()]
    with subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, "-P", __file__, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the driver
    ) as guard:
        try:
            yield
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            try:
                guard.wait(END_S)
            except subprocess.TimeoutExpired:
                guard.kill()


def _known(name: str) -> psutil.Process | None:
    pid, _, start = name.partition(":")
    try:
        process = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return None
    return process if abs(process.create_time() - float(start)) < CLOCK_S else None


def main(names: list[str]) -> None:
    """Wait for the driver's end, then kill those of the named processes that are left."""
    driver = os.getppid()
    processes = [process for name in names if (process := _known(name)) is not None]
    while os.getppid() == driver:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            break
    for process in processes:
        try:
            process.kill()  # psutil looks at the start time again
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
