"""The node's NVIDIA devices from NVML, through ctypes: the library comes with the driver and needs no package.

NVML lists GPUs by PCI address, whatever the masks say. The CUDA driver does so too only under
``CUDA_DEVICE_ORDER=PCI_BUS_ID``; by default it puts the fastest first, which is the same on a node of equal GPUs.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vime_devices.errors import TopologyError
from vime_devices.identity import Source, identify, normalise_bdf
from vime_devices.platforms import Platform
from vime_devices.topology import Device, Node

LIBRARIES = ("libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TEXT = 96  # bytes that NVML promises to suffice for a uuid or a name
_MIG_NONE = (3, 6)  # not supported; no such instance


class _Pci(ctypes.Structure):
    """``nvmlPciInfo_t``, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def read_nvml(library: Any = None) -> Node:
    """List the GPUs and MIG devices of this machine.

    Args:
        library: A loaded NVML (``ctypes.CDLL``); by default it is found where the driver puts it.

    Returns:
        The GPUs in NVML's order, then the MIG devices.

    Raises:
        TopologyError: There is no NVML, or it refuses.
    """
    library = library if library is not None else _load()
    _call(library, "nvmlInit_v2")
    try:
        return _read(library)
    finally:
        _call(library, "nvmlShutdown")


def _read(library: Any) -> Node:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    gpus: list[Device] = []
    migs: list[Device] = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        pci = _Pci()
        _call(library, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        bdf = normalise_bdf(f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0")
        uuid, name = _text(library, "nvmlDeviceGetUUID", handle), _text(library, "nvmlDeviceGetName", handle)
        gpus.append(Device(index, identify(uuid, Source.NVML), uuid, bdf, name, bdf))
        migs += _mig(library, handle, bdf, name)
    renumbered = [
        Device(count.value + place, mig.id, mig.uuid, mig.bdf, mig.arch, mig.socket, mig.partition, mig.mode)
        for place, mig in enumerate(migs)
    ]
    notes: tuple[str, ...] = ()
    if len({gpu.arch for gpu in gpus}) > 1:
        notes = ("GPUs of several kinds: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or ordinals differ from this list",)
    return Node(Platform.CUDA, (*gpus, *renumbered), notes)


def _mig(library: Any, gpu: ctypes.c_void_p, bdf: str, name: str) -> list[Device]:
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending)) != 0 or not current.value:
        return []  # a GPU that knows no MIG answers "not supported"
    _call(library, "nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(most))
    found = []
    for place in range(most.value):
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place, ctypes.byref(handle))
        if code in _MIG_NONE:
            continue
        if code != 0:
            raise _refusal("nvmlDeviceGetMigDeviceHandleByIndex", code)
        uuid = _text(library, "nvmlDeviceGetUUID", handle)
        found.append(Device(0, identify(uuid, Source.NVML), uuid, bdf, name, bdf, place, "MIG"))
    return found


def _text(library: Any, function: str, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(library, function, handle, buffer, _TEXT)
    return buffer.value.decode("ascii")


def _call(library: Any, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code != 0:
        raise _refusal(function, code)


def _refusal(function: str, code: int) -> TopologyError:
    return TopologyError(
        "NVML refused", where=function, seen=f"code {code}", expected="0", fix="check that `nvidia-smi -L` works here"
    )


def _load() -> Any:
    for path in LIBRARIES:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise TopologyError(
        "NVML is not installed",
        where="this host",
        seen=f"none of {', '.join(LIBRARIES)}",
        expected="the NVIDIA driver's library",
        fix="run on a host with the NVIDIA driver; in a container use the NVIDIA runtime",
    )
