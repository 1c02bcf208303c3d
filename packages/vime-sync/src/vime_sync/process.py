"""Who a process is, and whether it still lives, for processes that share a host.

A pid alone is not an identity: it is reused, and it means nothing in another pid namespace (a container). So an
identity is the boot, the pid namespace, the pid and the process's start time; life is only judged within the same boot
and namespace, and is otherwise unknown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot, or -1 if there is none (or only a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


def namespace() -> str:
    """This process's boot and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot[:8]}-{Path('/proc/self/ns/pid').stat().st_ino:x}"


def identity() -> dict[str, Any]:
    """This process's identity (JSON): ``namespace``, ``pid``, ``start``."""
    pid = os.getpid()
    return {"namespace": namespace(), "pid": pid, "start": start_time(pid)}


def is_dead(record: Any) -> bool:
    """Whether an identity certainly belongs to a process that has ended.

    Args:
        record: What `identity` gave in some process.

    Returns:
        True only for the same boot and namespace and a pid that is gone or was reused.
    """
    if not isinstance(record, dict) or record.get("namespace") != namespace():
        return False
    pid = record.get("pid")
    return isinstance(pid, int) and start_time(pid) != record.get("start")
