"""Shared memory: trainer and engine on one host, weights in CPU memory.

Buffers that the trainer allocated with `shared_empty` are exported as they are and never copied. All others are copied
into one segment a rank when a version is staged: one memory copy, made while the engines still generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vime_sync.control import Segment, segment_name
from vime_sync.errors import TransportError
from vime_sync.layout import DTYPES, dtype_name
from vime_sync.source import WeightSource
from vime_sync.striping import Place
from vime_sync.transports import BufferKey

_ALIGN = 64
#: Segments made by `shared_empty` in this process, by the address of their first byte.
_owned: dict[int, tuple[str, int]] = {}
_segments: list[Segment] = []


def shared_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a flat CPU tensor in shared memory, for a trainer that wants to publish without copying.

    Args:
        numel: Elements.
        dtype: Element type.

    Returns:
        An uninitialised 1-D tensor. Its memory belongs to the process until it ends (allocate once, not each step).

    Raises:
        TransportError: If there is not enough shared memory.
    """
    segment = Segment(segment_name(), max(numel, 1) * dtype.itemsize, create=True)
    tensor = segment.tensor(dtype, numel)
    address = tensor.data_ptr()
    _owned[address] = (segment.name, numel * dtype.itemsize)
    _segments.append(segment)
    return tensor


def release_shared() -> None:
    """Give up the names of all that `shared_empty` made in this process; it is done at exit in any case.

    For a process whose exit runs no handlers, such as an actor that its framework ends. Tensors stay usable, and so do
    the mappings that engines have; nobody new can open them.
    """
    for segment in _segments:
        segment.close()
    _segments.clear()
    _owned.clear()


class ShmExporter:
    """Trainer side; see the module's text."""

    def __init__(self, source: WeightSource) -> None:
        """Lay the buffers out in a segment, except those that are shared already.

        Raises:
            TransportError: If a buffer is not in CPU memory, or shared memory is exhausted.
        """
        self._source = source
        self._records: dict[str, dict[str, Any]] = {}
        self._copies: list[tuple[torch.Tensor, int]] = []
        end = 0
        for name, buffer in source.buffers.items():
            if buffer.device.type != "cpu":
                raise TransportError(
                    "shared memory carries CPU tensors only",
                    where=f"rank {source.rank}, buffer {name}",
                    seen=str(buffer.device),
                    fix="use the ipc transport for device memory",
                )
            record: dict[str, Any] = {"dtype": dtype_name(buffer.dtype), "numel": buffer.numel()}
            known = _owned.get(buffer.data_ptr())
            if known is not None and known[1] >= buffer.numel() * buffer.element_size():
                record["handle"] = {"segment": known[0], "offset": 0}
            else:
                record["handle"] = {"offset": end}
                self._copies.append((buffer, end))
                end += -(-buffer.numel() * buffer.element_size() // _ALIGN) * _ALIGN
            self._records[name] = record
        self._segment = Segment(segment_name(), end, create=True) if self._copies else None
        for record in self._records.values():
            if self._segment is not None:
                record["handle"].setdefault("segment", self._segment.name)

    def records(self) -> dict[str, dict[str, Any]]:
        """Each buffer's dtype, numel and segment."""
        return self._records

    def flush(self) -> None:
        """Copy the buffers that are not shared already."""
        if self._segment is not None:
            for buffer, offset in self._copies:
                self._segment.tensor(buffer.dtype, buffer.numel(), offset).copy_(buffer)

    def close(self) -> None:
        """Remove the segment's name; engines keep what they mapped until they let go."""
        if self._segment is not None:
            self._segment.close()


class ShmImporter:
    """Engine side; see the module's text."""

    def __init__(self, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> None:
        """Remember what to map."""
        self._sources, self._needed = sources, needed
        self._segments: list[Segment] = []
        if device.type != "cpu":
            raise TransportError(
                "shared memory feeds CPU engines only",
                seen=str(device),
                fix="use the ipc transport (push: --device cuda:N)",
            )

    def places(self) -> Mapping[BufferKey, Place]:
        """All of them here: one memory, which is everybody's."""
        return {
            (int(source["rank"]), str(name)): Place("memory", local=True)
            for source in self._sources
            for name in source["buffers"]
        }

    def narrow(self, needed: set[BufferKey]) -> None:
        """Map these, and no others."""
        self._needed = needed

    def open(self) -> Mapping[BufferKey, torch.Tensor]:
        """Map the segments.

        Raises:
            StaleSourceError: If a segment is gone or truncated.
            TransportError: If a handle is malformed.
        """
        buffers: dict[BufferKey, torch.Tensor] = {}
        for source in self._sources:
            for name, record in source["buffers"].items():
                if (source["rank"], name) not in self._needed:
                    continue
                handle = record.get("handle")
                if not isinstance(handle, dict) or not isinstance(handle.get("segment"), str):
                    raise TransportError("malformed handle", where=f"rank {source['rank']}, {name}", seen=repr(handle))
                offset, dtype = int(handle.get("offset", 0)), DTYPES[record["dtype"]]
                segment = Segment(handle["segment"], offset + record["numel"] * dtype.itemsize, create=False)
                self._segments.append(segment)
                buffers[(source["rank"], name)] = segment.tensor(dtype, record["numel"], offset)
        return buffers

    def fetch(self, version: int) -> None:
        """The mapping is live; only check that it is still as long as it was.

        Raises:
            StaleSourceError: If a segment was truncated.
        """
        for segment in self._segments:
            segment.check_size()

    def close(self) -> None:
        """Let go of the segments; each mapping goes with the last tensor over it."""
        self._segments.clear()
