"""A HIP runtime that exists in memory only: device lists, peer access and IPC handles of both ROCm lines.

It follows ROCm/clr and rocm-systems sources, and reproduces the published A/B probe of the own-first mask. It has not
been compared with AMD hardware.

- ROCm 6: a handle carries no device. Opening it maps the memory for the importer's *current* device, whatever the
  masks are; that device must reach the owner.
- ROCm 7 and later: a handle carries the exporter's local ordinal. Opening it takes the device at that ordinal of the
  *importer's* list: past the end is ``hipErrorInvalidValue``; another GPU than the owner's opens all the same, and
  enables peer access for that GPU.
- Both: a process cannot open its own handle, the only flag is ``hipIpcMemLazyEnablePeerAccess``, an empty allocation
  cannot be exported, and a handle opened twice gives one mapping, counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from vime_devices.errors import DeviceError
from vime_devices.resolve import resolve
from vime_devices.topology import Node

LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE = struct.Struct("<qqqq")  # allocation, size, pid, exporter's ordinal (-1: none)


class Line(StrEnum):
    """A generation of the runtime, by what its handles hold."""

    ROCM_6 = "rocm-6"
    ROCM_7 = "rocm-7"


class FakeHipError(DeviceError):
    """An error code of the fake runtime; ``what`` is the code's name."""


@dataclass(slots=True)
class Allocation:
    """Memory on one device.

    Attributes:
        owner: The pid that allocated it.
        physical: The device that holds it, by its index in the node.
        data: Its bytes.
    """

    owner: int
    physical: int
    data: bytearray


@dataclass(slots=True)
class View:
    """Memory as one process addresses it.

    Attributes:
        allocation: The key of the memory in the node.
        resolved: For opened memory the physical device that the handle's ordinal was taken for; else the owner's.
        opens: How often it was opened.
    """

    allocation: int
    resolved: int
    opens: int = 1


@dataclass(slots=True)
class FakeNode:
    """A machine with devices, shared by the processes of a test.

    Attributes:
        node: Its devices.
        line: The runtime that every process loads.
        unreachable: Ordered pairs of physical devices without peer access; by default all reach all.
    """

    node: Node
    line: Line = Line.ROCM_7
    unreachable: Iterable[tuple[int, int]] = ()
    memory: dict[int, Allocation] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=lambda: count(1000))

    def process(self, environ: Mapping[str, str]) -> FakeProcess:
        """Start a process; it reads its masks once, now.

        Args:
            environ: Its environment.

        Returns:
            The process, on its device 0.
        """
        return FakeProcess(self, next(self._numbers), tuple(d.index for d in resolve(environ, self.node).runtime))

    def reaches(self, one: int, other: int) -> bool:
        """Say whether a physical device can address another's memory."""
        return one == other or (one, other) not in set(self.unreachable)

    def number(self) -> int:
        """Return a number that was not used before."""
        return next(self._numbers)


@dataclass(slots=True)
class FakeProcess:
    """A process that has initialised HIP.

    Attributes:
        machine: The node it runs on.
        pid: Its id.
        devices: Its list: position is ordinal, value the physical device.
        current: The ordinal in use.
        peers: Pairs of ordinals (from, to) with peer access enabled, by request or by an open.
    """

    machine: FakeNode
    pid: int
    devices: tuple[int, ...]
    current: int = 0
    peers: set[tuple[int, int]] = field(default_factory=set)
    mappings: dict[int, View] = field(default_factory=dict)
    _opened: dict[bytes, int] = field(default_factory=dict)

    def set_device(self, ordinal: int) -> None:
        """Make a device the current one.

        Args:
            ordinal: Its number in this process.

        Raises:
            FakeHipError: ``hipErrorInvalidDevice``.
        """
        self.current = self._ordinal(ordinal, "hipErrorInvalidDevice", "hipSetDevice")

    def malloc(self, size: int) -> int:
        """Allocate on the current device.

        Args:
            size: Bytes; 0 gives a null pointer, as HIP does.

        Returns:
            The pointer.

        Raises:
            FakeHipError: ``hipErrorNoDevice`` in a process that sees none.
        """
        if not self.devices:
            raise FakeHipError("hipErrorNoDevice", where="hipMalloc", seen="no device", expected="at least one")
        if size == 0:
            return 0
        key, physical = self.machine.number(), self.devices[self.current]
        self.machine.memory[key] = Allocation(self.pid, physical, bytearray(size))
        pointer = self.machine.number()
        self.mappings[pointer] = View(key, physical)
        return pointer

    def free(self, pointer: int) -> None:
        """Release memory that this process allocated; what others have mapped of it is gone for them too."""
        del self.machine.memory[self.mappings.pop(pointer).allocation]

    def write(self, pointer: int, data: bytes) -> None:
        """Copy bytes to the start of a device pointer."""
        self._memory(pointer).data[: len(data)] = data

    def read(self, pointer: int) -> bytes:
        """Copy everything at a device pointer."""
        return bytes(self._memory(pointer).data)

    def enable_peer_access(self, ordinal: int) -> None:
        """Let the current device address another's memory.

        Args:
            ordinal: The other device.

        Raises:
            FakeHipError: ``hipErrorInvalidDevice``, or ``hipErrorPeerAccessUnsupported``.
        """
        self._ordinal(ordinal, "hipErrorInvalidDevice", "hipDeviceEnablePeerAccess")
        self._enable(ordinal, "hipDeviceEnablePeerAccess")

    def ipc_get_mem_handle(self, pointer: int) -> bytes:
        """Export memory.

        Args:
            pointer: Memory that this process allocated.

        Returns:
            The handle.

        Raises:
            FakeHipError: ``hipErrorInvalidValue`` for a null or foreign pointer.
        """
        mapping = self.mappings.get(pointer)
        allocation = self.machine.memory.get(mapping.allocation) if mapping else None
        if mapping is None or allocation is None or allocation.owner != self.pid:
            raise FakeHipError(
                "hipErrorInvalidValue", where="hipIpcGetMemHandle", seen=hex(pointer), expected="own, non-empty memory"
            )
        ordinal = self.devices.index(allocation.physical) if self.machine.line is Line.ROCM_7 else -1
        return _HANDLE.pack(mapping.allocation, len(allocation.data), self.pid, ordinal)

    def ipc_open_mem_handle(self, handle: bytes, flags: int = LAZY_ENABLE_PEER_ACCESS) -> int:
        """Map memory that another process exported.

        Args:
            handle: From ``ipc_get_mem_handle``.
            flags: ``LAZY_ENABLE_PEER_ACCESS``.

        Returns:
            A pointer; opening a handle again gives the same one.

        Raises:
            FakeHipError: ``hipErrorInvalidValue`` or ``hipErrorInvalidContext``, as the runtime line has it.
        """
        key, _, pid, ordinal = _HANDLE.unpack(handle)
        if flags != LAZY_ENABLE_PEER_ACCESS:
            raise self._refused("hipErrorInvalidValue", f"flags {flags}", "hipIpcMemLazyEnablePeerAccess")
        if pid == self.pid:
            raise self._refused("hipErrorInvalidContext", "a handle of this process", "one of another process")
        if handle in self._opened:
            self.mappings[self._opened[handle]].opens += 1
            return self._opened[handle]
        allocation = self.machine.memory.get(key)
        if allocation is None:
            raise self._refused("hipErrorInvalidValue", "memory that its owner has freed", "live memory")
        resolved = self._resolve(ordinal, allocation)
        pointer = self.machine.number()
        self.mappings[pointer] = View(key, resolved)
        self._opened[handle] = pointer
        return pointer

    def ipc_close_mem_handle(self, pointer: int) -> None:
        """Undo one open; the mapping goes with the last.

        Args:
            pointer: From ``ipc_open_mem_handle``.
        """
        mapping = self.mappings[pointer]
        mapping.opens -= 1
        if mapping.opens == 0:
            del self.mappings[pointer]
            self._opened = {handle: opened for handle, opened in self._opened.items() if opened != pointer}

    def opened_on_wrong_device(self, pointer: int) -> bool:
        """Say whether a mapping was made for a device that does not hold the memory; the runtime itself is silent.

        Args:
            pointer: From ``ipc_open_mem_handle``.

        Returns:
            True where the exporter's ordinal denotes another GPU in this process.
        """
        mapping = self.mappings[pointer]
        return mapping.resolved != self.machine.memory[mapping.allocation].physical

    def _resolve(self, ordinal: int, allocation: Allocation) -> int:
        """Return the physical device for which an open maps the memory."""
        if ordinal < 0:
            here = self.devices[self.current]
            if not self.machine.reaches(here, allocation.physical):
                raise self._refused("hipErrorInvalidValue", f"no path from device {here}", "peer access to the owner")
            return allocation.physical
        self._ordinal(ordinal, "hipErrorInvalidValue", "hipIpcOpenMemHandle")
        if ordinal != self.current:
            self._enable(ordinal, "hipIpcOpenMemHandle")
        return self.devices[ordinal]

    def _enable(self, ordinal: int, where: str) -> None:
        here, there = self.devices[self.current], self.devices[ordinal]
        if not self.machine.reaches(here, there):
            raise FakeHipError(
                "hipErrorPeerAccessUnsupported", where=where, seen=f"{here} -> {there}", expected="a peer path"
            )
        self.peers.add((self.current, ordinal))

    def _ordinal(self, ordinal: int, code: str, where: str) -> int:
        if not 0 <= ordinal < len(self.devices):
            raise FakeHipError(
                code, where=where, seen=f"ordinal {ordinal}", expected=f"one of {len(self.devices)} visible devices"
            )
        return ordinal

    def _memory(self, pointer: int) -> Allocation:
        mapping = self.mappings.get(pointer)
        allocation = self.machine.memory.get(mapping.allocation) if mapping else None
        if allocation is None:
            raise FakeHipError("hipErrorIllegalAddress", seen=hex(pointer), expected="a live device pointer")
        return allocation

    def _refused(self, code: str, seen: str, expected: str) -> FakeHipError:
        return FakeHipError(code, where=f"hipIpcOpenMemHandle in process {self.pid}", seen=seen, expected=expected)
