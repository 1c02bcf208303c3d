"""One canonical id for a device, whichever library described it.

The same AMD GPU is ``GPU-e044801689257fb4`` to ROCr, ``0xe0448016...`` (decimal) in the KFD tree,
``65303434-3830-3136-3839-323537666234`` to torch (HIP's 16 uuid bytes are the ASCII characters of the id, and torch
prints bytes), and something else again to amdsmi before ROCm 7.12. Here it is ``amd:e044801689257fb4``, with ``/p<N>``
for a partition. NVIDIA: ``nvidia:<uuid>``, and ``nvidia-mig:<uuid>`` for a MIG device, which is a device of its own.

Ids that identify nothing are refused, never compared: devices without one all say ``XX`` or zero, and APUs say a small
number. ``assign`` then falls back to the PCI address within one boot of one machine (``bdf:<boot id>/<address>``), and
says so. Two predicates, not one: the same device (memory may be shared), the same socket (copies are cheap).

Forms of ids are from ROCm and torch sources and public reports; those of torch on CUDA and NVML agree on an H200 node.
AMD forms are not confirmed on hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from vime_devices.errors import IdentityError

_RFC = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEX16 = re.compile(r"[0-9a-f]{16}")
_BDF = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_WEAK_BITS = 32  # ids below 2**32 are counters (APUs report 1, 2, ...), not the random-looking ids of the others


class Source(StrEnum):
    """Who spelled an id."""

    TORCH_HIP = "torch-hip"
    TORCH_CUDA = "torch-cuda"
    ROCR = "rocr"
    KFD = "kfd"
    AMDSMI_SERIAL = "amdsmi-serial"
    AMDSMI_UUID = "amdsmi-uuid"
    NVML = "nvml"


class Relation(StrEnum):
    """What two ids say about two devices."""

    SAME_DEVICE = "same device"
    SAME_SOCKET = "same socket"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A canonical id.

    Attributes:
        scheme: ``amd``, ``nvidia``, ``nvidia-mig``, ``amdsmi`` (not comparable with the others) or ``bdf``.
        unique: What identifies the device within the scheme, in lower case.
        partition: Index of a partition on its socket, where the device is partitioned.
        socket: What its sibling partitions share, unique in the world, where known. It is no part of equality.
    """

    scheme: str
    unique: str
    partition: int | None = None
    socket: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the canonical text."""
        return f"{self.scheme}:{self.unique}" + ("" if self.partition is None else f"/p{self.partition}")


def identify(text: str | int, source: Source) -> DeviceId:
    """Make a canonical id of what one library calls a device.

    Args:
        text: The library's spelling (an int or decimal text for KFD's ``unique_id``).
        source: Which library; the same text means different things from different ones.

    Returns:
        The id.

    Raises:
        IdentityError: The text has not the form of its source, or identifies nothing (``XX``, zero, a counter).
    """
    reader = _READERS[source]
    cleaned = str(text).strip().lower()
    if cleaned.removeprefix("gpu-") in ("xx", "", "n/a", "none") or _ascii_of(cleaned).startswith("xx"):
        raise _refuse(text, source, "an id (the device reports that it has none)")
    result = reader(cleaned)
    if result is None:
        raise _refuse(text, source, f"the form that {source.value} writes")
    if result.scheme == "amd" and int(result.unique, 16) < 2**_WEAK_BITS:
        raise _refuse(text, source, "an id unique in the world (this one is zero or a counter)")
    if not result.unique.strip("0-"):
        raise _refuse(text, source, "a non-zero id")
    return result


def normalise_bdf(text: str) -> str:
    """Return a PCI address as ``dddd:bb:dd.f`` in lower case.

    Args:
        text: An address with or without its domain (NVML writes eight digits of it).

    Returns:
        The address.

    Raises:
        IdentityError: It is not a PCI address.
    """
    match = _BDF.fullmatch(text.strip().lower())
    if match is None:
        raise IdentityError(
            "not a PCI address",
            where="normalise_bdf",
            seen=repr(text),
            expected="domain:bus:device.function, hexadecimal",
            fix="take it from `lspci -D`, or from a device's `bdf`",
        )
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}"


def relation(one: DeviceId, other: DeviceId) -> Relation:
    """Say what two ids tell about two devices.

    Args:
        one: An id.
        other: Another, from any process of any machine.

    Returns:
        ``UNKNOWN`` where the ids belong to schemes that cannot be compared (amdsmi's own uuid, or an address against a
        unique id). Ids within one scheme differ if and only if the devices do.
    """
    if one.scheme != other.scheme:
        nvidia = {one.scheme, other.scheme} == {"nvidia", "nvidia-mig"}
        if nvidia and one.socket and one.socket == other.socket:
            return Relation.SAME_SOCKET
        return Relation.DIFFERENT if {one.scheme, other.scheme} <= _GLOBAL else Relation.UNKNOWN
    if one.unique == other.unique:
        if one.partition == other.partition:
            return Relation.SAME_DEVICE
        return Relation.UNKNOWN if None in (one.partition, other.partition) else Relation.SAME_SOCKET
    return Relation.SAME_SOCKET if one.socket and one.socket == other.socket else Relation.DIFFERENT


def require_same(one: DeviceId, other: DeviceId, *, where: str) -> None:
    """Refuse to go on unless both ids denote one device.

    Args:
        one: The device that was promised.
        other: The device that was found.
        where: What is about to happen, for the error.

    Raises:
        IdentityError: They are not known to be the same.
    """
    found = relation(one, other)
    if found is not Relation.SAME_DEVICE:
        raise IdentityError(
            "not the promised device",
            where=where,
            seen=f"{other} ({found.value})",
            expected=str(one),
            fix="select devices by id, not by ordinal or rank; compare both processes with `vime-devices explain`",
        )


def fallback_id(boot_id: str, bdf: str, partition: int | None = None) -> DeviceId:
    """Identify a device that has no usable id by its address; it holds for one boot of one machine.

    Args:
        boot_id: ``/proc/sys/kernel/random/boot_id``.
        bdf: Its PCI address.
        partition: Its partition, where several share an address.

    Returns:
        An id of the ``bdf`` scheme.
    """
    address = normalise_bdf(bdf)
    return DeviceId("bdf", f"{boot_id.strip().lower()}/{address}", partition, f"{boot_id}/{address.rsplit('.', 1)[0]}")


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known about one device before ids are compared.

    Attributes:
        text: The library's spelling of its id.
        source: Which library.
        bdf: Its PCI address.
        partition: Its partition on the socket, where partitioned.
        socket: What sibling partitions share.
    """

    text: str | int
    source: Source
    bdf: str
    partition: int | None = None
    socket: str = ""


def assign(claims: Sequence[Claim], boot_id: str) -> tuple[list[DeviceId], list[str]]:
    """Give every device of a node an id that no other has.

    Args:
        claims: The devices, in any order.
        boot_id: The machine's boot id.

    Returns:
        The ids in the order of ``claims``, and for each id that was refused one line that says why and what stands in.

    Raises:
        IdentityError: Two devices have neither usable ids nor addresses that tell them apart.
    """
    ids: list[DeviceId | None] = []
    notes: dict[int, str] = {}
    for index, claim in enumerate(claims):
        try:
            known = replace(identify(claim.text, claim.source), partition=claim.partition, socket=claim.socket)
        except IdentityError as error:
            ids.append(None)
            notes[index] = error.expected
        else:
            ids.append(known)
    for index, known_id in enumerate(ids):
        if known_id is not None and ids.count(known_id) > 1:
            notes[index] = f"an id of its own ({known_id} is shared by {ids.count(known_id)} devices)"
    result = [
        fallback_id(boot_id, claim.bdf, claim.partition) if index in notes or known_id is None else known_id
        for index, (claim, known_id) in enumerate(zip(claims, ids, strict=True))
    ]
    clash = next((known_id for known_id in result if result.count(known_id) > 1), None)
    if clash is not None:
        raise IdentityError(
            "devices that cannot be told apart",
            where=f"boot {boot_id}",
            seen=f"{result.count(clash)} devices with the id {clash}",
            expected="a unique id or an address per device",
            fix="update the driver; partitions with one address and no ids cannot be addressed safely",
        )
    lines = [f"{claims[i].bdf}: seen {claims[i].text!r}, expected {why}; using {result[i]}" for i, why in notes.items()]
    return result, lines


def _ascii_of(text: str) -> str:
    """Decode torch's spelling of HIP uuid bytes into the characters they are; empty where they are not characters."""
    digits = text.replace("-", "")
    if len(digits) != 32 or not re.fullmatch(r"[0-9a-f]+", digits):
        return ""
    data = bytes.fromhex(digits).rstrip(b"\0")
    return data.decode("ascii").lower() if data.isascii() else ""


def _torch_hip(text: str) -> DeviceId | None:
    characters = _ascii_of(text)
    return DeviceId("amd", characters) if _HEX16.fullmatch(characters) else None


def _hex16(text: str) -> DeviceId | None:
    digits = text.removeprefix("gpu-").removeprefix("0x").zfill(16)
    return DeviceId("amd", digits) if _HEX16.fullmatch(digits) else None


def _kfd(text: str) -> DeviceId | None:
    return DeviceId("amd", f"{int(text):016x}") if text.isdecimal() and int(text) < 2**64 else None


def _amdsmi_uuid(text: str) -> DeviceId | None:
    return DeviceId("amdsmi", text) if _RFC.fullmatch(text) else None


def _nvidia(text: str) -> DeviceId | None:
    scheme = "nvidia-mig" if text.startswith("mig-") else "nvidia"
    body = text.removeprefix("mig-").removeprefix("gpu-")
    gpu, *instances = body.split("/")  # before driver 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
    if not _RFC.fullmatch(gpu) or (instances and scheme == "nvidia"):
        return None
    return DeviceId(scheme, body, socket=gpu if instances or scheme == "nvidia" else "")


def _refuse(text: str | int, source: Source, expected: str) -> IdentityError:
    return IdentityError(
        "an id that identifies nothing",
        where=source.value,
        seen=repr(text),
        expected=expected,
        fix="identify the device by boot id and PCI address (vime_devices.assign does)",
    )


_GLOBAL = {"amd", "nvidia", "nvidia-mig"}
_READERS: dict[Source, Callable[[str], DeviceId | None]] = {
    Source.TORCH_HIP: _torch_hip,
    Source.TORCH_CUDA: _nvidia,
    Source.ROCR: _hex16,
    Source.KFD: _kfd,
    Source.AMDSMI_SERIAL: _hex16,
    Source.AMDSMI_UUID: _amdsmi_uuid,
    Source.NVML: _nvidia,
}
