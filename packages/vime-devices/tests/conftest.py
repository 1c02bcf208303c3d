"""Trees of a KFD driver, as its sysfs writes them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from vime_devices import Node, read_kfd

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
