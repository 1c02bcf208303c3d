"""How bytes get from a trainer rank's buffers into an engine worker: one small interface, one file a transport.

An `Exporter` lives in the trainer process and makes the source's buffers reachable; an `Importer` lives in the engine
worker and presents them as flat tensors, keyed by (rank, buffer). Nothing else in the package knows how they meet, and
a new transport is one file plus a line in `EXPORTERS` and `IMPORTERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from vime_sync.errors import TransportError
from vime_sync.source import WeightSource

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


EXPORTERS = {"shm": ("vime_sync.transports.shm", "ShmExporter"), "ipc": ("vime_sync.transports.ipc", "IpcExporter")}
IMPORTERS = {"shm": ("vime_sync.transports.shm", "ShmImporter"), "ipc": ("vime_sync.transports.ipc", "IpcImporter")}


def _lookup(table: Mapping[str, tuple[str, str]], name: str) -> Any:
    if name not in table:
        raise TransportError("unknown transport", seen=repr(name), expected=", ".join(table))
    module, attribute = table[name]
    return getattr(importlib.import_module(module), attribute)


def make_exporter(name: str, source: WeightSource) -> Exporter:
    """Open the trainer side of a transport.

    Args:
        name: A key of `EXPORTERS`.
        source: What to export.

    Raises:
        TransportError: If the name is unknown or the transport cannot carry this source.
    """
    exporter: Exporter = _lookup(EXPORTERS, name)(source)
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
