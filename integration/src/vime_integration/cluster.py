"""Ray, started for one run and ended with it.

The run has a cluster of its own (``address="local"``): it joins no cluster that happens to run on the host. Ray hands
out no devices here. Placement is ours (placement.py): every actor sees the devices that vime-devices gives it, in an
order that the whole node agrees on, so Ray must be told to leave the masks alone before it starts.

Ray ties its processes to the driver (PR_SET_PDEATHSIG), so a ``kill -9`` of the driver takes the cluster with it; what
Ray forgets, remains.py ends. The actors tie what they start to themselves in the same way.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from vime_integration.errors import PipelineError
from vime_integration.remains import end_with_the_driver, started

logger = logging.getLogger(__name__)

#: Ray would kill the direct children of a worker that ends. An engine's is the warden, whose death leaves the engine's
#: processes to nobody; left alone, it sees its owner's end and takes them all with it.
LEAVE_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}


@contextmanager
def ray_cluster(*, cpus: int, environment: Mapping[str, str]) -> Iterator[Path]:
    """Run a local Ray cluster for the length of the ``with`` block.

    Args:
        cpus: Number of actors that may live at the same time, in Ray's unit of one CPU each.
        environment: Variables that Ray's processes must see from their start, such as its mask opt-outs.

    Yields:
        A temporary folder for actors that leave something in theirs; it goes with the cluster.

    Raises:
        PipelineError: Ray did not start; it waits at most 30 s for each of its own processes.
    """
    variables = {**LEAVE_CHILDREN, **environment}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    talking, passed_on = _quieted()
    not_of_ray = started()
    try:
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            folder = Path(tempfile.mkdtemp(prefix="vime-run-"))
        except (RuntimeError, TimeoutError, OSError, ConnectionError) as error:
            raise PipelineError(
                "Ray did not start",
                seen=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                expected="a local cluster within 30 s",
                fix="look at /tmp/ray/session_latest/logs; free memory and /dev/shm; set TMPDIR where /tmp is full",
            ) from error
        with end_with_the_driver(folder, spare=not_of_ray):
            try:
                yield folder
            finally:
                ray.shutdown()
    finally:
        ray.shutdown()  # of what a start that failed has left
        log = logging.getLogger("ray")
        log.handlers[:], log.propagate = talking, passed_on
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _quieted() -> tuple[list[logging.Handler], bool]:
    """Send what Ray says to the process's own log; returns how it was: what sent it to the terminal, and propagation.

    A question to an engine that died meanwhile is dropped with its answer, and Ray reports that as an unhandled error.
    """
    log = logging.getLogger("ray")
    before = list(log.handlers), log.propagate
    log.handlers[:], log.propagate = [], True
    return before


def log_to_file(path: Path) -> None:
    """Send this process's log to ``path``, and nowhere else.

    Called once by every actor, so that each process of a run has one log file under its own name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
