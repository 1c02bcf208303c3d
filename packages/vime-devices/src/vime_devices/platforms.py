"""Which vendor's rules hold on this machine, decided without importing torch.

The rules of masks differ between HIP and CUDA, so a wrong guess is worse than an error. Evidence is read from device
nodes that the kernel drivers create; a driver library that is merely installed proves nothing. Where both vendors'
devices exist, the installed torch decides (its ``version.py`` is read as text), because that is the runtime that will
read the mask.
"""

from __future__ import annotations

import importlib.util
import re
from enum import StrEnum
from pathlib import Path

from vime_devices.errors import PlatformError


class Platform(StrEnum):
    """A family of device runtimes with one set of visibility rules."""

    HIP = "hip"
    CUDA = "cuda"
    CPU = "cpu"


def torch_build(version_file: Path | None = None) -> Platform | None:
    """Tell what the installed torch was built for, by reading its ``version.py``.

    Args:
        version_file: The file to read; by default that of the torch an ``import torch`` would find.

    Returns:
        The platform of the build, or None where torch is not installed.
    """
    if version_file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return None
    text = version_file.read_text(encoding="utf-8")
    for name, platform in (("hip", Platform.HIP), ("cuda", Platform.CUDA)):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return platform
    return Platform.CPU


def has_amd_devices(root: Path = Path("/")) -> bool:
    """Say whether the AMD compute driver offers at least one GPU node.

    Args:
        root: Root of the file system to look at.

    Returns:
        True where ``/dev/kfd`` exists and a KFD node has compute units.
    """
    if not (root / "dev/kfd").exists():
        return False
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    return any(_simd_count(node) > 0 for node in sorted(nodes.glob("*/properties")))


def has_nvidia_devices(root: Path = Path("/")) -> bool:
    """Say whether the NVIDIA driver offers at least one GPU.

    Args:
        root: Root of the file system to look at.

    Returns:
        True where ``/dev/nvidia<N>``, the driver's list in ``/proc``, or (under WSL) the DirectX node with its CUDA
        library exists.
    """
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in (root / "dev").glob("nvidia*")):
        return True
    if any((root / "proc/driver/nvidia/gpus").glob("*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def detect_platform(root: Path = Path("/"), *, build: Platform | None = None) -> Platform:
    """Decide which vendor's rules hold here.

    Args:
        root: Root of the file system to look at.
        build: What torch was built for; by default it is read from the installed torch, where needed.

    Returns:
        HIP, CUDA, or CPU where no accelerator is offered.

    Raises:
        PlatformError: Both vendors' devices exist and torch does not decide.
    """
    amd, nvidia = has_amd_devices(root), has_nvidia_devices(root)
    if amd and nvidia:
        build = build if build is not None else torch_build()
        if build in (Platform.HIP, Platform.CUDA):
            return build
        raise PlatformError(
            "cannot tell which runtime will read the masks",
            where=str(root),
            seen="AMD and NVIDIA devices, and no torch built for either",
            expected="one vendor, or a torch built for one of them",
            fix="install the torch build you mean to run, or pass the platform explicitly",
        )
    if amd:
        return Platform.HIP
    return Platform.CUDA if nvidia else Platform.CPU


def _simd_count(properties: Path) -> int:
    try:
        text = properties.read_text(encoding="ascii")
    except OSError:  # A container may forbid a node it was not given: that node is not ours.
        return 0
    match = re.search(r"^simd_count (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0
