"""How bytes get from a trainer rank's buffers into an engine worker: one small interface, one file a transport.

An `Exporter` lives in the trainer process and makes the source's buffers reachable; an `Importer` lives in the engine
worker and presents them as flat tensors, keyed by (rank, buffer). Nothing else in the package knows how they meet, and
a new transport is one file plus a line in `EXPORTERS` and `IMPORTERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch

from vime_sync.control import ControlBlock, ControlReader
from vime_sync.errors import TransportError
from vime_sync.source import WeightSource
from vime_sync.striping import Place

BufferKey = tuple[int, str]


class Exporter(Protocol):
    """Trainer side of a transport."""

    def records(self) -> dict[str, dict[str, Any]]:
        """Each buffer's manifest record: dtype, numel, handle (JSON)."""

    def flush(self) -> None:
        """Make the buffers' present content visible to importers; returns when it is."""

    def close(self) -> None:
        """Release what was exported."""


class Importer(Protocol):
    """Engine side of a transport."""

    def open(self) -> Mapping[BufferKey, torch.Tensor]:
        """Map (or allocate) the needed buffers; called once."""

    def fetch(self, version: int) -> None:
        """Make the buffers hold `version`; a mapped transport has nothing to do."""

    def close(self) -> None:
        """Release the mappings."""


@runtime_checkable
class KnowsPlaces(Importer, Protocol):
    """An importer that can tell how far away buffers are before it opens any, and then opens what it is told to."""

    def places(self) -> Mapping[BufferKey, Place]:
        """Where every buffer of the manifest is, seen from this worker."""

    def narrow(self, needed: set[BufferKey]) -> None:
        """Open these, and no others."""


@runtime_checkable
class ServesControl(Protocol):
    """An exporter that also brings the control block to importers, on request."""

    def serve(self, control: ControlReader) -> None:
        """Called once, when the control block exists."""


@runtime_checkable
class SealsVersions(Protocol):
    """An exporter that writes a version down, control block included."""

    def seal(self, version: int, control: ControlReader) -> None:
        """Called last in `Publisher.stage`."""


@runtime_checkable
class CarriesControl(Protocol):
    """An importer that reaches the control block by its own means, because it may be on another host."""

    def control(self, source: dict[str, Any]) -> ControlReader:
        """The control block of a source record."""


EXPORTERS = {
    "shm": ("vime_sync.transports.shm", "ShmExporter"),
    "ipc": ("vime_sync.transports.ipc", "IpcExporter"),
    "collective": ("vime_sync.transports.collective", "CollectiveExporter"),
    "disk": ("vime_sync.transports.disk", "DiskExporter"),
    "delta": ("vime_sync.transports.delta", "DeltaExporter"),
}
IMPORTERS = {
    "shm": ("vime_sync.transports.shm", "ShmImporter"),
    "ipc": ("vime_sync.transports.ipc", "IpcImporter"),
    "collective": ("vime_sync.transports.collective", "CollectiveImporter"),
    "disk": ("vime_sync.transports.disk", "DiskImporter"),
    "delta": ("vime_sync.transports.delta", "DeltaImporter"),
}


def _lookup(table: Mapping[str, tuple[str, str]], name: str) -> Any:
    if name not in table:
        raise TransportError("unknown transport", seen=repr(name), expected=", ".join(table))
    module, attribute = table[name]
    return getattr(importlib.import_module(module), attribute)


def make_exporter(name: str, source: WeightSource, options: Mapping[str, Any] | None = None) -> Exporter:
    """Open the trainer side of a transport.

    Args:
        name: A key of `EXPORTERS`.
        source: What to export.
        options: Keyword arguments of the transport's exporter.

    Raises:
        TransportError: If the name or an option is unknown, or the transport cannot carry this source.
    """
    kind = _lookup(EXPORTERS, name)
    try:
        signature(kind).bind(source, **(options or {}))
    except TypeError as cause:
        raise TransportError("wrong options of a transport", where=name, seen=str(cause)) from cause
    exporter: Exporter = kind(source, **(options or {}))
    return exporter


def make_importer(name: str, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> Importer:
    """Open the engine side of a transport.

    Args:
        name: A key of `IMPORTERS`.
        sources: The manifest's source records.
        needed: The buffers that this worker's plan reads.
        device: The worker's device.

    Raises:
        TransportError: If the name is unknown.
    """
    importer: Importer = _lookup(IMPORTERS, name)(sources, needed, device)
    return importer


def needed_records(sources: Sequence[dict[str, Any]], needed: Collection[BufferKey]) -> dict[BufferKey, dict[str, Any]]:
    """Pick the records of the buffers that a worker reads.

    Args:
        sources: The manifest's source records.
        needed: Rank and name of each buffer.

    Returns:
        Rank and name -> the buffer's record, in the order of the manifest.
    """
    return {
        (int(source["rank"]), name): record
        for source in sources
        for name, record in source["buffers"].items()
        if (int(source["rank"]), name) in needed
    }


def open_control(importer: Importer, source: dict[str, Any]) -> ControlReader:
    """The control block of a source record: over the transport if it carries it, else in shared memory.

    Args:
        importer: The transport's engine side.
        source: One of the manifest's source records.

    Raises:
        StaleSourceError: If the block is not there.
    """
    if isinstance(importer, CarriesControl):
        return importer.control(source)
    return ControlBlock(source["control"]["segment"], int(source["control"]["pieces"]), create=False)
