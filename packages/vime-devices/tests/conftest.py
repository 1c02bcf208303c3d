"""Trees of a KFD driver, as its sysfs writes them, and processes on the nodes that they describe."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from vime_devices import Node, read_kfd
from vime_devices.preflight import Snapshot, take_snapshot

settings.register_profile("busy", deadline=None)  # time per example says nothing on a shared machine
settings.load_profile("busy")

BOOT = "0f3e6b8a-6d0e-4a57-9d3c-2b7f3c1f9e11"


def write_kfd(tree: Path, gpus: Sequence[dict[str, int]], cpus: int = 2) -> Path:
    """Write a topology with CPU nodes first, then one node per dict of GPU properties."""
    properties = [{"cpu_cores_count": 96, "simd_count": 0, "unique_id": 0} for _ in range(cpus)]
    properties += [{"cpu_cores_count": 0, "simd_count": 1216, "gfx_target_version": 90402} | gpu for gpu in gpus]
    for number, values in enumerate(properties):
        folder = tree / "nodes" / str(number)
        folder.mkdir(parents=True)
        lines = "".join(f"{name} {value}\n" for name, value in values.items())
        (folder / "properties").write_text(lines, encoding="ascii")
    return tree


def mi300x(index: int, **more: int) -> dict[str, int]:
    """One whole GPU: PCI bus and id grow with the index."""
    return {
        "unique_id": 0xE044801689257FB0 + index,
        "location_id": (0x05 + 0x10 * index) << 8,
        "domain": 0,
        "drm_render_minor": 128 + index,
    } | more


@pytest.fixture
def kfd(tmp_path: Path) -> Callable[..., Path]:
    """A writer of trees under the test's own folder."""
    return lambda gpus, **options: write_kfd(tmp_path / "topology", gpus, **options)


@pytest.fixture
def gpu() -> Callable[..., dict[str, int]]:
    """Properties of a whole GPU."""
    return mi300x


@pytest.fixture
def boot() -> str:
    """A boot id."""
    return BOOT


@pytest.fixture
def node8(tmp_path: Path) -> Node:
    """Eight whole GPUs, read from a tree."""
    return read_kfd(write_kfd(tmp_path / "eight", [mi300x(i) for i in range(8)]), boot_id=BOOT)


@pytest.fixture
def snap(node8: Node) -> Callable[..., Snapshot]:
    """A snapshot of a process on eight GPUs, as a healthy container gives it; keywords replace fields."""

    def make(name: str = "process", environ: dict[str, str] | None = None, node: Node = node8, **fields: object):
        taken = take_snapshot(name, node.platform, environ=environ or {}, node=node)
        healthy = {
            "boot_id": BOOT,
            "nofile": 1 << 20,
            "shm_bytes": 1 << 36,
            "shm_device": 25,
            "seccomp": 0,
            "ptrace_scope": 0,
            "torch_imported": False,
            "runtime_count": -1,
            "runtime_version": "7.14.0",
            "kernel_driver": "dkms 6.14.14",
            "namespaces": {"net": "net:[1]", "pid": "pid:[1]", "ipc": "ipc:[1]"},
            "started_environ": dict(taken.environ),
        }
        return replace(taken, **(healthy | fields))

    return make
