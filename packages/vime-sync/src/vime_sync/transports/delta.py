"""Disk delta: of most versions only the elements that changed, compressed.

In RL with bf16 weights a step changes one element in a hundred or so: the update is smaller than the rounding
(PULSE, arXiv 2602.03839). A version is written either whole (the first, and every `full_every`-th) or as the positions
and the new values of what differs, bit for bit, from its *base*, the version before::

    FOLDER/rank-00000/0000000008/delta.json    {"base": 7, "buffers": [{"name", "count", "gap", "width"}]}
                                /delta.zst     for each buffer: gaps between positions, then values (zstd, checksummed)

A reader that holds the base applies one file; one that holds an older version, or none, walks back to the nearest base
it has or to a whole version, and forward from there. A missing link is an error that names it. Values replace, they are
not added, so applying a delta twice is the same as once. That the sum is right is proved by the digest like any other
transport: it speaks of the whole content, of which the delta moved a part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vime_sync.errors import StaleSourceError, TransportError
from vime_sync.source import WeightSource
from vime_sync.transports import BufferKey
from vime_sync.transports.disk import BUFFERS, DiskExporter, DiskImporter, _around, _handle, read_buffer, version_folder

HEADER, PAYLOAD = "delta.json", "delta.zst"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = {"int32": torch.int32, "int64": torch.int64}


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as cause:
        raise TransportError(
            "zstandard is missing", where="delta transport", fix="pip install vime-sync[delta]"
        ) from cause
    return zstandard


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and minus zero differs from zero."""
    return tensor.view(_BITS[tensor.element_size()])


class DeltaExporter(DiskExporter):
    """Trainer side; see the module's text."""

    def __init__(self, source: WeightSource, *, folder: str | Path, full_every: int = 16, level: int = 1) -> None:
        """Export into a folder. Keeps a copy of the last version in CPU memory to compare with.

        Args:
            source: What to export.
            folder: Shared with the engines; made if missing.
            full_every: Every so many versions one is written whole.
            level: The level of zstd.

        Raises:
            TransportError: If zstandard is not installed, or the folder cannot be made.
        """
        super().__init__(source, folder=folder)
        if full_every < 1:
            raise TransportError("no version would be whole", where="delta transport", seen=f"full_every={full_every}")
        self._every, self._level, self._since = full_every, level, 0
        self._zstd = _zstd()
        self._last: dict[str, torch.Tensor] = {}
        self._base = -1

    def _write(self, folder: Path, version: int) -> None:
        now = {name: buffer.detach().cpu() for name, buffer in self._source.buffers.items()}
        if self._base < 0 or self._since + 1 >= self._every or version <= self._base:
            super()._write(folder, version)
            self._since = 0
        else:
            self._write_delta(folder, now)
            self._since += 1
        # Only a version that was written is a base; `seal` fails before the next one is compared with it.
        self._last, self._base = {name: buffer.clone() for name, buffer in now.items()}, version

    def _write_delta(self, folder: Path, now: dict[str, torch.Tensor]) -> None:
        entries, payload = [], []
        for name, buffer in now.items():
            bits = _bits(buffer)
            at = (bits != _bits(self._last[name])).nonzero().flatten()
            gaps = torch.diff(at, prepend=torch.zeros(1, dtype=at.dtype))
            kind = "int32" if buffer.numel() < 2**31 else "int64"
            parts = [gaps.to(_GAPS[kind]), bits[at]]
            payload += [part.numpy().tobytes() for part in parts]
            entries.append({"name": name, "count": at.numel(), "gap": kind, "width": bits.element_size()})
        header = {"base": self._base, "buffers": entries}
        (folder / HEADER).write_text(json.dumps(header))
        packer = self._zstd.ZstdCompressor(level=self._level, write_checksum=True, write_content_size=True)
        (folder / PAYLOAD).write_bytes(packer.compress(b"".join(payload)))

    def seal(self, version: int, control: Any) -> None:
        """Write a version, whole or as a delta; after a failure the next one is whole.

        Raises:
            TransportError: If it cannot be written; earlier versions are as they were.
        """
        try:
            super().seal(version, control)
        except TransportError:
            self._base = -1
            raise

    def _superseded(self, folder: Path, version: int) -> list[Path]:
        """Everything before the last whole version but one: newcomers start there."""
        versions, newer = _around(folder, version)
        whole = [index for index, path in enumerate(versions) if (path / BUFFERS).exists()]
        return (versions[: whole[-2]] if len(whole) > 1 else []) + newer


class DeltaImporter(DiskImporter):
    """Engine side; see the module's text."""

    def __init__(self, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> None:
        """Remember what is needed; nothing is held yet."""
        super().__init__(sources, needed, device)
        self._zstd = _zstd()
        self._held: dict[int, int] = {}

    def fetch(self, version: int) -> None:
        """Bring the buffers to a version, along the chain of deltas.

        Raises:
            StaleSourceError: If a link of the chain is missing.
            TransportError: If one cannot be read.
        """
        for rank in sorted({rank for rank, _ in self._buffers}):
            folder = _handle(next(record for (r, _), record in self._records.items() if r == rank))
            chain = self._chain(folder, rank, version)
            self._held.pop(rank, None)  # until all is applied, nothing is held
            for step in chain:
                self._apply(version_folder(folder, rank, step), rank)
            self._held[rank] = version

    def _chain(self, folder: Path, rank: int, version: int) -> list[int]:
        """The versions to apply, oldest first."""
        chain: list[int] = []
        at = version
        while at != self._held.get(rank, -1):
            where = version_folder(folder, rank, at)
            chain.append(at)
            if (where / BUFFERS).exists():
                break
            base = self._header(where, f"version {version}")["base"]
            if not isinstance(base, int) or base >= at:
                raise TransportError("malformed delta", where=str(where), seen=f"base {base!r}")
            at = base
        return chain[::-1]

    @staticmethod
    def _header(folder: Path, goal: str) -> dict[str, Any]:
        try:
            header = json.loads((folder / HEADER).read_text())
            return {"base": header["base"], "buffers": list(header["buffers"])}
        except OSError as cause:
            raise StaleSourceError(
                "a base version is missing",
                where=str(folder),
                seen=str(cause),
                expected=f"the chain of deltas that leads to {goal}",
                fix="stage with a smaller full_every, or keep the engine closer to the trainer",
            ) from cause
        except (ValueError, KeyError, TypeError) as cause:
            raise TransportError("malformed delta", where=str(folder), seen=str(cause)) from cause

    def _apply(self, folder: Path, rank: int) -> None:
        mine = {name: buffer for (r, name), buffer in self._buffers.items() if r == rank}
        if (folder / BUFFERS).exists():
            for name, buffer in mine.items():
                read_buffer(folder / BUFFERS, name, buffer)
            return
        header = self._header(folder, folder.name)
        try:
            payload = bytearray(self._zstd.ZstdDecompressor().decompress((folder / PAYLOAD).read_bytes()))
            self._patch(payload, header["buffers"], mine)
        except (self._zstd.ZstdError, OSError, ValueError, KeyError, RuntimeError, IndexError) as cause:
            raise TransportError("a delta cannot be read", where=str(folder), seen=str(cause)) from cause

    @staticmethod
    def _patch(payload: bytearray, entries: list[Any], mine: dict[str, torch.Tensor]) -> None:
        offset = 0
        for entry in entries:
            count, kind, width = int(entry["count"]), _GAPS[entry["gap"]], int(entry["width"])
            into = mine.get(entry["name"])
            if count and into is not None:
                at = torch.frombuffer(payload, dtype=kind, count=count, offset=offset).to(torch.int64).cumsum(0)
                start = offset + count * kind.itemsize
                values = torch.frombuffer(payload[start : start + count * width], dtype=_BITS[width], count=count)
                _bits(into)[at.to(into.device)] = values.to(into.device)
            offset += count * (kind.itemsize + width)
