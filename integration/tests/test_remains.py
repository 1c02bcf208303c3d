"""Nothing of a Ray cluster outlives its driver, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from vime_integration import remains

#: A driver with a process that has nothing to do with the cluster.
DRIVER = """
import subprocess, sys, time
from vime_integration.cluster import ray_cluster
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(other.pid, flush=True)
with ray_cluster(cpus=1, environment={}) as folder:
    (folder / "left").mkdir()
    print(folder, flush=True)
    time.sleep(600)
"""
#: A driver with a process that nothing ties to it, and a fork that keeps the pipe to what ends it.
FORKED = """
import os, subprocess, sys, time
from pathlib import Path
from vime_integration.remains import end_with_the_driver
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with end_with_the_driver(Path(sys.argv[1])):
    if (fork := os.fork()) == 0:
        time.sleep(600)
    print(sleeper.pid, fork, flush=True)
    time.sleep(600)
"""
#: Ray's agents would stay for 60 s, its workers stay for 3.
GONE_S = 30.0


@pytest.mark.slow
def test_a_cluster_goes_with_a_driver_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        other = psutil.Process(int(driver.stdout.readline()))
        try:
            folder = Path(driver.stdout.readline().strip())
            assert (folder / "left").is_dir()
            below = [p for p in psutil.Process(driver.pid).children(recursive=True) if p != other]
            titles = [" ".join(process.cmdline()) for process in below]
            driver.kill()
            assert any("DashboardAgent" in title for title in titles), f"Ray has the agents that this is for: {titles}"
            until_gone(below)
            assert not folder.exists()
            assert other.status() != psutil.STATUS_ZOMBIE, "it is none of Ray's"
        finally:
            other.kill()


def until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, GONE_S)
    assert [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_neither_a_fork_that_keeps_the_pipe_nor_ctrl_c_saves_what_is_left(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-c", FORKED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        sleeper, fork = (psutil.Process(int(word)) for word in driver.stdout.readline().split())
        guard = next(process for process in psutil.Process(driver.pid).children() if process not in (sleeper, fork))
        try:
            if how is signal.SIGKILL:
                driver.kill()
            else:
                os.killpg(driver.pid, how)  # as a terminal does
            until_gone([sleeper, guard])
            assert not folder.exists()
        finally:
            for process in (sleeper, fork):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def _guard(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", remains.__file__, str(os.getpid()), str(folder), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def test_only_the_process_that_was_named_is_killed_and_not_before_the_end(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    start = psutil.Process(sleeper.pid).create_time()
    with _guard(tmp_path / "none", f"{sleeper.pid}:{start - 60!r}") as other:
        other.communicate(timeout=30)
    assert (other.returncode, sleeper.poll()) == (0, None), "the id belonged to another process"
    with _guard(tmp_path / "none", f"{sleeper.pid}:{start!r}") as guard:
        time.sleep(1)
        assert (guard.poll(), sleeper.poll()) == (None, None), "the driver lives"
        guard.communicate(timeout=30)
    assert sleeper.wait(30) == -9
