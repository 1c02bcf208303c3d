"""Checks of the machine: system, memory, shared memory, limits, disk, network names and ports.

Limits come from what has broken runs: a container's 64 MiB of ``/dev/shm`` ends in bus errors, 1024 open files end when
Ray has started some dozen actors, Ray stops making objects on a disk that is 95% full, and an HTTP proxy in the
environment swallows requests to 127.0.0.1.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vime_integration.doctor.findings import Check, Status, at_least, size

PYTHONS = ((3, 11), (3, 13))
GIB = 2**30
NOFILE_FAILS, NOFILE_WARNS, NOFILE_CONTAINER = 4096, 16384, 1048576
SHM_FAILS, SHM_WARNS = 256 << 20, 1 << 30
MEMORY_FAILS, MEMORY_WARNS = 4 * GIB, 8 * GIB
TEMP_FAILS, TEMP_WARNS = 1 * GIB, 5 * GIB
RAY_FULL = 0.95  # the share of a disk above which Ray's object store refuses to spill
PORTS = 16  # server, rendezvous and Ray's own processes of a small run
UNLIMITED_CGROUP = 1 << 60


@dataclass(frozen=True, slots=True)
class Host:
    """Where to look; tests give another root.

    Attributes:
        root: Root of the file system.
        environ: The environment.
        temp: Folder of temporary files, where Ray keeps its sessions.
    """

    root: Path = field(default_factory=lambda: Path("/"))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    temp: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))


def check_host(host: Host, *, gpu: bool) -> Iterator[Check]:
    """Check the machine.

    Args:
        host: Where to look.
        gpu: Whether the run will use GPUs: then pinned memory needs its limit lifted.
    """
    yield _system()
    yield _cores()
    yield at_least(
        "host.memory",
        available_memory(host.root),
        fails_below=MEMORY_FAILS,
        warns_below=MEMORY_WARNS,
        show=size,
        fix="end other programs, or raise the container's memory limit",
    )
    yield _shm(host.root)
    yield _nofile()
    if gpu:
        yield _memlock()
    yield _temp(host.temp)
    yield _ports()
    yield _names()
    yield _proxy(host.environ)


def available_memory(root: Path) -> int:
    """Return the bytes that processes may still take: the kernel's estimate, within the container's limit."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    amounts = {name: int(text.split()[0]) * 1024 for name, _, text in (line.partition(":") for line in lines) if text}
    free = amounts["MemAvailable"]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, taken = _number(root / limit), _number(root / used)
        if most is not None and taken is not None and most < UNLIMITED_CGROUP:
            free = min(free, max(0, most - taken))
    return free


def shm_free(root: Path) -> int:
    """Return the free bytes of ``/dev/shm``."""
    return shutil.disk_usage(root / "dev/shm").free


def _system() -> Check:
    version = sys.version_info[:2]
    good = sys.platform == "linux" and PYTHONS[0] <= version <= PYTHONS[1]
    seen = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return Check(
        "host.system",
        Status.OK if good else Status.FAIL,
        seen,
        "Linux, Python 3.11 to 3.13",
        "install one of these Pythons",
    )


def _cores() -> Check:
    return at_least(
        "host.cores",
        len(os.sched_getaffinity(0)),
        fails_below=1,
        warns_below=2,
        show=lambda amount: f"{amount:g} cores",
        fix="widen the container's --cpus or cpuset: server, trainer and rollout each want one",
    )


def _shm(root: Path) -> Check:
    return at_least(
        "host.shm",
        shm_free(root),
        fails_below=SHM_FAILS,
        warns_below=SHM_WARNS,
        show=lambda amount: f"{size(amount)} free in /dev/shm",
        fix="start the container with --ipc=host, or a larger --shm-size",
    )


def _nofile() -> Check:
    """Judge the limit by what Ray can raise it to, which it does when it starts, and by what it is for others."""
    soft, hard = (
        float("inf") if limit == resource.RLIM_INFINITY else float(limit)
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    status = Status.FAIL if hard < NOFILE_FAILS else Status.WARN if soft < NOFILE_WARNS else Status.OK
    container = f"start the container with --ulimit nofile={NOFILE_CONTAINER}:{NOFILE_CONTAINER}"
    return Check(
        "host.nofile",
        status,
        f"{soft:g} open files (at most {hard:g})",
        f"at least {NOFILE_WARNS}",
        f"ulimit -n {NOFILE_WARNS}" if hard >= NOFILE_WARNS else container,
    )


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    good = soft == resource.RLIM_INFINITY or soft >= GIB
    seen = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return Check(
        "host.memlock",
        Status.OK if good else Status.WARN,
        f"{seen} of locked memory",
        "unlimited",
        "start the container with --ulimit memlock=-1: registering host memory for RDMA fails otherwise",
    )


def _temp(folder: Path) -> Check:
    usage = shutil.disk_usage(folder)
    found = at_least(
        "host.temp",
        usage.free,
        fails_below=TEMP_FAILS,
        warns_below=TEMP_WARNS,
        show=lambda amount: f"{size(amount)} free in {folder}",
        fix="free space, or set TMPDIR",
    )
    if found.status is Status.OK and usage.used / usage.total > RAY_FULL:
        share = f"{usage.used / usage.total:.0%} full: {folder}"
        return Check(
            "host.temp",
            Status.WARN,
            share,
            f"at most {RAY_FULL:.0%}, or Ray stops spilling objects",
            "free space, or set TMPDIR to another disk",
        )
    return found


def _ports() -> Check:
    with ExitStack() as stack:
        for _ in range(PORTS):
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", 0))
            except OSError as error:
                return Check(
                    "host.ports",
                    Status.FAIL,
                    f"no free port on 127.0.0.1: {error}",
                    f"{PORTS} free ports",
                    "widen net.ipv4.ip_local_port_range, or end what holds them",
                )
    return Check("host.ports", Status.OK, f"{PORTS} free ports on 127.0.0.1")


def _names() -> Check:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check(
            "host.name",
            Status.WARN,
            f"{name} does not resolve: {error}",
            "an address",
            f"add `127.0.0.1 {name}` to /etc/hosts: gloo and Ray look the name up",
        )
    return Check("host.name", Status.OK, f"{name} is {address}")


def _proxy(environ: Mapping[str, str]) -> Check:
    """Look for a proxy that would get the requests to engines on this host."""
    set_here = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    exempt = {part.strip() for name in ("no_proxy", "NO_PROXY") for part in environ.get(name, "").split(",")}
    if not set_here or exempt & {"127.0.0.1", "*"}:
        return Check("host.proxy", Status.OK, "requests to 127.0.0.1 go there")
    return Check(
        "host.proxy",
        Status.WARN,
        f"{set_here[0]} is set and no_proxy leaves 127.0.0.1 out",
        "requests to engines on this host to go there",
        "export no_proxy=127.0.0.1,localhost",
    )


def _number(path: Path) -> int | None:
    """Read a number; None where the file is absent or says ``max``."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:  # this kernel has the other version of cgroups, or none
        return None
    return int(text) if text.isdecimal() else None
