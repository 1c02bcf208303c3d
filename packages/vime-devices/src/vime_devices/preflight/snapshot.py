"""What one process sees and how it would share memory, as plain data that another process can read.

Collecting touches no device: it reads the environment, the driver's tree and ``/proc``. torch is looked at only where
the process has imported it already. ``/proc/self/environ`` holds the environment as it was when the process started,
which shows a mask that was changed too late.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vime_devices import variables
from vime_devices.errors import DeviceError, MaskError
from vime_devices.platforms import Platform
from vime_devices.resolve import resolve
from vime_devices.topology import Device, Node, boot_id, discover_node

VERSION = 1


@dataclass(frozen=True, slots=True)
class SeenDevice:
    """A device as one process numbers it.

    Attributes:
        ordinal: Its number in this process.
        id: Its canonical id.
        physical: Its place in the driver's list, below every mask.
        uuid: Its spelling in a mask.
        bdf: Its PCI address.
    """

    ordinal: int
    id: str
    physical: int
    uuid: str
    bdf: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one process publishes. Texts are empty and numbers -1 where a value could not be read.

    Attributes:
        name: What the process is called in findings.
        platform: Whose rules hold.
        boot_id: The machine.
        pid: The process.
        devices: What it enumerates, by ordinal.
        own: The ordinals it allocates and exports on.
        node_devices: Every device of the node, in the driver's order (masks and containers of others may differ).
        environ: The variables that decide visibility and sharing.
        started_environ: The same variables as they were when the process started.
        disagreements: Where readers of its masks differ.
        node_notes: What was odd about the node's devices.
        archs: The ISAs or products of the node's devices.
        hidden_nodes: GPU nodes that the container hides.
        runtime_version: The ROCm release, or the NVIDIA driver's version.
        kernel_driver: ``dkms <version>`` or ``in-tree`` for amdgpu.
        torch_imported: Whether torch is loaded in the process.
        runtime_count: How many devices the runtime has, where torch has initialised it; else -1.
        namespaces: Inode texts of the net, pid and ipc namespaces.
        shm_device: Device number of ``/dev/shm``: equal only where two processes share it.
        shm_bytes: Its size.
        nofile: The soft limit of open files.
        memlock: The soft limit of locked memory in bytes; -1 is unlimited.
        seccomp: Mode of the system call filter: 0 none, 2 a filter is in force.
        ptrace_scope: Yama's setting: 0 lets same-user processes trace each other.
    """

    name: str
    platform: str
    boot_id: str
    pid: int
    devices: tuple[SeenDevice, ...]
    own: tuple[int, ...]
    node_devices: tuple[SeenDevice, ...]
    environ: Mapping[str, str]
    started_environ: Mapping[str, str] = field(default_factory=dict)
    disagreements: tuple[str, ...] = ()
    node_notes: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    hidden_nodes: int = 0
    runtime_version: str = ""
    kernel_driver: str = ""
    torch_imported: bool = False
    runtime_count: int = -1
    namespaces: Mapping[str, str] = field(default_factory=dict)
    shm_device: int = -1
    shm_bytes: int = -1
    nofile: int = -1
    memlock: int = -1
    seccomp: int = -1
    ptrace_scope: int = -1

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        return {"snapshot_version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Rebuild a snapshot from ``to_json``; fields that this version does not know are refused.

        Args:
            data: The JSON object.

        Returns:
            The snapshot.

        Raises:
            DeviceError: It is no snapshot, or one of another version.
        """
        try:
            fields = dict(data)
            version = fields.pop("snapshot_version")
            for key in ("devices", "node_devices"):
                fields[key] = tuple(SeenDevice(**item) for item in fields[key])
            for key in ("own", "disagreements", "node_notes", "archs"):
                fields[key] = tuple(fields[key])
            snapshot = cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise DeviceError(
                "not a snapshot",
                where="Snapshot.from_json",
                seen=f"{type(error).__name__}: {error}",
                expected="the fields of to_json",
                fix="write it with `vime-devices snapshot` of this version",
            ) from error
        if version != VERSION:
            raise DeviceError(
                "a snapshot of another version",
                where="Snapshot.from_json",
                seen=repr(version),
                expected=repr(VERSION),
                fix="run one version of vime-devices in every process",
            )
        return snapshot

    @property
    def ipc_mode(self) -> str:
        """How HIP will pass memory: ``legacy`` (KFD handles), ``dmabuf``, or ``default`` (the release decides)."""
        text = self.environ.get(variables.IPC_LEGACY)
        return "default" if text is None else "legacy" if text == "1" else "dmabuf"

    @property
    def expandable_segments(self) -> bool:
        """Whether torch's allocator is told to use virtual memory, whose handles are of another kind."""
        settings = (self.environ.get(name, "") for name in variables.ALLOCATOR)
        return any(re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE) for text in settings)


def take_snapshot(
    name: str,
    platform: Platform,
    *,
    environ: Mapping[str, str] | None = None,
    own: Sequence[int] | None = None,
    node: Node | None = None,
    root: Path = Path("/"),
) -> Snapshot:
    """Collect what this process sees.

    Args:
        name: What to call it in findings, such as ``trainer rank 3``.
        platform: HIP or CUDA.
        environ: Its environment; by default the present one.
        own: The ordinals it allocates on; by default all that it sees.
        node: The node's devices; by default they are discovered.
        root: Root of the file system to read.

    Returns:
        The snapshot.

    Raises:
        TopologyError: The node's devices cannot be listed.
        PlatformError: The CPU platform has no devices to see.
        MaskError: ``own`` holds an ordinal that the process does not have.
    """
    environ = dict(os.environ) if environ is None else dict(environ)
    node = discover_node(platform, root) if node is None else node
    resolution = resolve(environ, node)
    count = len(resolution.runtime)
    own = tuple(range(count)) if own is None else tuple(own)
    if not all(0 <= ordinal < count for ordinal in own):
        raise MaskError(
            "own ordinals that the process does not have",
            where=name,
            seen=str(own),
            expected=f"below {count}",
            fix="pass local indices under the process's mask, not physical ones",
        )
    return Snapshot(
        name=name,
        platform=platform.value,
        boot_id=boot_id(root),
        pid=os.getpid(),
        devices=_seen(resolution.runtime),
        own=own,
        node_devices=_seen(node.devices),
        environ=_published(environ),
        started_environ=_published(_started_environ(root)),
        disagreements=resolution.disagreements,
        node_notes=node.notes,
        archs=tuple(sorted({device.arch for device in node.devices})),
        hidden_nodes=node.hidden,
        runtime_version=_runtime_version(platform, root),
        kernel_driver=_kernel_driver(platform, root),
        **_torch_state(),
        **_container(root),
    )


def _torch_state() -> dict[str, Any]:
    """Say whether torch is here and what its runtime counts, without importing or initialising anything."""
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    return {
        "torch_imported": torch is not None,
        "runtime_count": torch.cuda.device_count() if torch and started else -1,
    }


def _container(root: Path) -> dict[str, Any]:
    """Read what a container was given: namespaces, shared memory, limits, and what may trace what."""
    shm_device, shm_bytes = _shm(root)
    return {
        "namespaces": {kind: _link(root / "proc/self/ns" / kind) for kind in ("net", "pid", "ipc")},
        "shm_device": shm_device,
        "shm_bytes": shm_bytes,
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "seccomp": _number(root / "proc/self/status", r"^Seccomp:\s*(\d+)"),
        "ptrace_scope": _number(root / "proc/sys/kernel/yama/ptrace_scope", r"^(\d+)"),
    }


def _seen(devices: Sequence[Device]) -> tuple[SeenDevice, ...]:
    return tuple(SeenDevice(i, str(d.id), d.index, d.uuid, d.bdf) for i, d in enumerate(devices))


def _published(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in variables.PUBLISHED if name in environ}


def _started_environ(root: Path) -> dict[str, str]:
    try:
        data = (root / "proc/self/environ").read_bytes()
    except OSError:  # hidden from the process: then nothing is known, and nothing is claimed
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _runtime_version(platform: Platform, root: Path) -> str:
    if platform is Platform.HIP:
        path, pattern = root / "opt/rocm/.info/version", r"^(\S+)"
    else:
        path, pattern = root / "proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"
    return _find(path, pattern)


def _kernel_driver(platform: Platform, root: Path) -> str:
    """Tell AMD's packaged driver, which states a version, from the kernel's own, which does not."""
    if platform is not Platform.HIP or not (root / "sys/module/amdgpu").is_dir():
        return ""
    version = _find(root / "sys/module/amdgpu/version", r"^(\S+)")
    return f"dkms {version}" if version else "in-tree"


def _shm(root: Path) -> tuple[int, int]:
    path = root / "dev/shm"
    if not path.is_dir():
        return -1, -1
    stats = os.statvfs(path)
    return path.stat().st_dev, stats.f_frsize * stats.f_blocks


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _number(path: Path, pattern: str) -> int:
    text = _find(path, pattern)
    return int(text) if text else -1


def _find(path: Path, pattern: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else ""
