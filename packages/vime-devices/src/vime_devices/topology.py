"""The node's devices, read from the kernel driver's tree (AMD) or NVML (NVIDIA); never guessed from ordinals.

KFD: ``/sys/class/kfd/kfd/topology/nodes/<N>/properties`` holds ``name value`` lines; a node with ``simd_count`` above 0
is a GPU (or a partition of one). ROCr enumerates them in node order and keeps devices of one ISA together, so on a
mixed machine the two orders differ; the tools of amdsmi sort by PCI address instead. A container may hide nodes: those
whose properties cannot be read, or whose render device is absent, are left out and counted in ``hidden``.

Partitions (DPX, TPX, QPX, CPX) are nodes of their own. Newer kernels keep the partition's number in bits 28 to 31 of
``location_id``; older ones count in the PCI function, or give all partitions one address. Each is tried in that order.

From kernel and ROCr sources; the readers run against recorded forms of the tree. Not confirmed on AMD hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vime_devices.errors import TopologyError
from vime_devices.identity import Claim, DeviceId, Source, assign
from vime_devices.platforms import Platform

KFD_TREE = Path("sys/class/kfd/kfd/topology")
BOOT_ID = Path("proc/sys/kernel/random/boot_id")
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX", 8: "CPX"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node (a GPU, or a partition of one).

    Attributes:
        index: Its place in the driver's list, below every mask.
        id: Its canonical id.
        uuid: Its spelling in a mask (``GPU-<16 hex>``, ``GPU-<uuid>``, ``MIG-<uuid>``); ``GPU-XX`` where it has none.
        bdf: Its PCI address.
        arch: Its ISA (``gfx942``) or product name.
        socket: What partitions of one GPU share.
        partition: Its place on the socket; None where the GPU is whole.
        mode: The compute partition mode of its socket (SPX, DPX, TPX, QPX, CPX); empty where that has no meaning.
    """

    index: int
    id: DeviceId
    uuid: str
    bdf: str
    arch: str = ""
    socket: str = ""
    partition: int | None = None
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """The devices of one machine in the driver's order.

    Attributes:
        platform: Whose devices they are.
        devices: The devices; ``devices[i].index == i``.
        notes: What a reader should know: ids that were replaced, an enumeration order that is not certain.
        hidden: KFD GPU nodes that this container may not use.
        assumed: Whether the devices were made up to reason about another machine.
    """

    platform: Platform
    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()
    hidden: int = 0
    assumed: bool = False


def discover_node(platform: Platform, root: Path = Path("/")) -> Node:
    """Read this machine's devices.

    Args:
        platform: Whose devices.
        root: Root of the file system to read.

    Returns:
        The node; without devices on the CPU platform.

    Raises:
        TopologyError: The driver offers no list.
    """
    if platform is Platform.CPU:
        return Node(platform, ())
    if platform is Platform.HIP:
        return read_kfd(root / KFD_TREE, boot_id=boot_id(root), render=root / "dev/dri")
    from vime_devices.nvml import read_nvml  # late: it loads the driver's library

    return read_nvml()


def synthetic_node(platform: Platform, count: int) -> Node:
    """Make a node of ``count`` whole devices with made-up ids, to reason about a machine that is not at hand.

    Args:
        platform: HIP or CUDA.
        count: How many devices.

    Returns:
        A node marked as ``assumed``.
    """
    devices = []
    for index in range(count):
        bdf = f"0000:{index + 1:02x}:00.0"
        if platform is Platform.HIP:
            unique = f"{0xA0_0000_0000_0000 + index:016x}"
            devices.append(Device(index, DeviceId("amd", unique), f"GPU-{unique}", bdf, socket=bdf[:-2]))
        else:
            unique = f"00000000-0000-4000-8000-{index + 1:012x}"
            devices.append(Device(index, DeviceId("nvidia", unique, None, unique), f"GPU-{unique}", bdf))
    return Node(platform, tuple(devices), assumed=True)


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's boot id, or a placeholder where it is hidden (addresses then hold for this host only)."""
    path = root / BOOT_ID
    return path.read_text(encoding="ascii").strip() if path.is_file() else "unknown-boot"


def read_kfd(tree: Path, *, boot_id: str, render: Path | None = None) -> Node:
    """Read a KFD topology tree.

    Args:
        tree: The folder that holds ``nodes``.
        boot_id: For devices without a usable id.
        render: The folder of the render devices; None to believe the tree alone.

    Returns:
        The GPUs in ROCr's order.

    Raises:
        TopologyError: The folder is absent, or a node's properties are malformed.
        IdentityError: Devices cannot be told apart.
    """
    folder = tree / "nodes"
    if not folder.is_dir():
        raise TopologyError(
            "no KFD topology",
            where=str(folder),
            seen="no such folder",
            expected="one folder per node, from the amdgpu driver",
            fix="load amdgpu; in a container pass --device=/dev/kfd --device=/dev/dri",
        )
    found, hidden = [], 0
    for path in sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)):
        try:
            text = (path / "properties").read_text(encoding="ascii")
        except PermissionError:
            hidden += 1
            continue
        properties = _properties(text, path)
        if properties.get("simd_count", 0) == 0:
            continue  # a CPU
        minor = properties.get("drm_render_minor", 0)
        if render is not None and minor > 0 and not (render / f"renderD{minor}").exists():
            hidden += 1
            continue
        found.append(properties)
    return _node(_rocr_order(found), boot_id, hidden)


def _properties(text: str, path: Path) -> dict[str, int]:
    """Parse ``name value`` lines; every value of the tree's properties file is a decimal number."""
    result: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not value.strip().isdecimal():
            raise TopologyError(
                "a malformed KFD property",
                where=str(path / "properties"),
                seen=repr(line),
                expected="'name number'",
                fix="check that this is a KFD topology; report the line if the driver wrote it",
            )
        result[name] = int(value)
    return result


def _rocr_order(nodes: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Keep devices of one ISA together, the groups in the order of their first member."""
    groups: dict[int, list[dict[str, int]]] = {}
    for node in nodes:
        groups.setdefault(node.get("gfx_target_version", 0), []).append(node)
    return [node for group in groups.values() for node in group]


def _node(nodes: Sequence[Mapping[str, int]], boot: str, hidden: int) -> Node:
    sockets = [_socket(node) for node in nodes]
    partitions = _partitions(nodes, sockets)
    claims = [
        Claim(node.get("unique_id", 0), Source.KFD, _bdf(node), partition, f"{boot}/{socket}")
        for node, socket, partition in zip(nodes, sockets, partitions, strict=True)
    ]
    ids, notes = assign(claims, boot)
    if len({node.get("gfx_target_version", 0) for node in nodes}) > 1:
        notes.append("devices of several ISAs: their order in ROCr is not confirmed on hardware; select by UUID")
    devices = [
        Device(
            index=index,
            id=ids[index],
            uuid=f"GPU-{node['unique_id']:016x}" if node.get("unique_id") else "GPU-XX",
            bdf=claims[index].bdf,
            arch=_arch(node.get("gfx_target_version", 0)),
            socket=sockets[index],
            partition=partitions[index],
            mode=MODES.get(sockets.count(sockets[index]), f"{sockets.count(sockets[index])} partitions"),
        )
        for index, node in enumerate(nodes)
    ]
    return Node(Platform.HIP, tuple(devices), tuple(notes), hidden)


def _partitions(nodes: Sequence[Mapping[str, int]], sockets: Sequence[str]) -> list[int | None]:
    """Number the partitions of each socket: by the kernel's number, else the PCI function, else the node order."""
    result: list[int | None] = []
    for index, (node, socket) in enumerate(zip(nodes, sockets, strict=True)):
        siblings = [other for other, name in zip(nodes, sockets, strict=True) if name == socket]
        if len(siblings) == 1:
            result.append(None)
            continue
        for number in (_kernel_partition, _function):
            if len({number(sibling) for sibling in siblings}) == len(siblings):
                result.append(number(node))
                break
        else:
            result.append(sockets[:index].count(socket))
    return result


def _kernel_partition(node: Mapping[str, int]) -> int:
    return node.get("location_id", 0) >> 28 & 0xF


def _function(node: Mapping[str, int]) -> int:
    return node.get("location_id", 0) & 0x7


def _socket(node: Mapping[str, int]) -> str:
    """Name the socket by domain, bus and device, which the partitions of one GPU share."""
    location = node.get("location_id", 0)
    return f"{node.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"


def _bdf(node: Mapping[str, int]) -> str:
    return f"{_socket(node)}.{_function(node)}"


def _arch(version: int) -> str:
    """Spell ``gfx_target_version`` (major * 10000 + minor * 100 + stepping) as the compiler does: 90402 is gfx942."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
