"""What each process of a run holds: memory, file descriptors, threads; and the shared-memory segments of all.

A run that leaks ends days later with an error that names something else. So these are metrics of every step: whatever
grows without end can be seen after an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is looked at, nothing is written here


def process_gauges(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return ``proc/<name>_{rss_mib,fds,threads}``, summed over the processes of each name, and ``proc/shm_segments``.

    The segments are those that vime-sync made in these processes.

    Args:
        processes: Process ids by the name of their role; ids of processes that have ended count nothing.
    """
    metrics: dict[str, float] = {}
    for name, pids in processes.items():
        totals = [0.0, 0.0, 0.0]
        for pid in pids:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    seen = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())
            except psutil.Error:
                continue
            totals = [total + value for total, value in zip(totals, seen, strict=True)]
        for kind, total in zip(("rss_mib", "fds", "threads"), totals, strict=True):
            metrics[f"proc/{name}_{kind}"] = float(total)
    metrics["proc/shm_segments"] = float(_segments({str(pid) for pids in processes.values() for pid in pids}))
    return metrics


def _segments(pids: set[str]) -> int:
    """Count the shared-memory segments that these processes made: vime-sync's names hold the maker's id."""
    if not SHARED_MEMORY.is_dir():
        return 0
    return sum(not pids.isdisjoint(path.name.split("-")) for path in SHARED_MEMORY.iterdir())
