"""Disk: every version is a folder that appears whole, on any file system that trainer and engines share.

::

    FOLDER/rank-00000/0000000007/buffers.safetensors     the flat buffers of the rank
                                /control.json            who wrote it, the words of its control block: version, digests

A version is written beside its place, flushed to the disk, and renamed: a reader sees all of it or nothing, and a
trainer that dies half-way, or a full disk, leaves what was there before. Old versions are removed when newer ones are
complete. An engine on another host reads as soon as the file system shows it the folder.

A folder may be used again by a trainer that starts anew. What an earlier one left there is never taken for a version of
the new one's, whatever its number; later versions go with the first that the new one writes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vime_sync.control import ControlReader
from vime_sync.errors import StaleSourceError, TransportError
from vime_sync.layout import DTYPES, dtype_name
from vime_sync.source import WeightSource
from vime_sync.transports import BufferKey, needed_records

BUFFERS, CONTROL = "buffers.safetensors", "control.json"


def version_folder(base: str | Path, rank: int, version: int) -> Path:
    """Where a rank's version lies."""
    return Path(base) / f"rank-{rank:05d}" / f"{version:010d}"


class DiskExporter:
    """Trainer side; see the module's text."""

    def __init__(self, source: WeightSource, *, folder: str | Path, keep: int = 2) -> None:
        """Export into a folder.

        Args:
            source: What to export.
            folder: Shared with the engines; made if missing.
            keep: Complete versions that stay.

        Raises:
            TransportError: If the folder cannot be made, or `keep` is not positive.
        """
        if keep < 1:
            raise TransportError("nothing would be kept", where="disk transport", seen=f"keep={keep}", expected=">= 1")
        self._source, self._folder, self._keep = source, Path(folder).absolute(), keep
        self._writer = secrets.token_hex(8)
        try:
            version_folder(self._folder, source.rank, 0).parent.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise TransportError("cannot make the folder", where=str(folder), seen=str(cause)) from cause

    def records(self) -> dict[str, dict[str, Any]]:
        """Each buffer's dtype, numel, folder and writer."""
        handle = {"folder": str(self._folder), "writer": self._writer}
        return {
            name: {"dtype": dtype_name(buffer.dtype), "numel": buffer.numel(), "handle": handle}
            for name, buffer in self._source.buffers.items()
        }

    def flush(self) -> None:
        """Nothing yet: a version is written when its digests are known."""

    def seal(self, version: int, control: ControlReader) -> None:
        """Write a version, whole or not at all.

        Raises:
            TransportError: If it cannot be written (the disk is full, say); earlier versions are as they were.
        """
        final = version_folder(self._folder, self._source.rank, version)
        partial = final.with_name(f".{final.name}.partial")
        try:
            for left in final.parent.glob(".*.partial"):  # of a trainer that died half-way
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            self._write(partial, version)
            (partial / CONTROL).write_text(json.dumps({"writer": self._writer, "words": control.words()}))
            for path in (*partial.iterdir(), partial):
                _sync(path)
            if final.exists():
                shutil.rmtree(final)  # the same version again: a retry
            partial.rename(final)
            _sync(final.parent)
        except (OSError, SafetensorError) as cause:
            shutil.rmtree(partial, ignore_errors=True)
            raise TransportError(
                "a version could not be written",
                where=str(final),
                seen=str(cause),
                fix="free space and stage a newer version; engines keep what they serve",
            ) from cause
        for old in self._superseded(final.parent, version):
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, folder: Path, version: int) -> None:
        """Write the content of a version."""
        save_file(
            {name: buffer.detach().cpu().clone() for name, buffer in self._source.buffers.items()}, folder / BUFFERS
        )

    def _superseded(self, folder: Path, version: int) -> list[Path]:
        older, newer = _around(folder, version)
        return older[: -self._keep] + newer

    def close(self) -> None:
        """What is on the disk stays there."""


def _around(folder: Path, version: int) -> tuple[list[Path], list[Path]]:
    """Complete versions up to one, and later ones: versions rise, so those are of a trainer that was here before."""
    found = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return [p for p in found if int(p.name) <= version], [p for p in found if int(p.name) > version]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DiskControl(ControlReader):
    """The control block of a version on the disk."""

    def __init__(self, folder: Path, writer: str, rank: int, pieces: int) -> None:
        """Read from `folder` what `writer` writes."""
        self._folder, self._writer, self._rank, self.pieces = folder, writer, rank, pieces

    def _load(self, version: int, where: str) -> None:
        path = version_folder(self._folder, self._rank, version) / CONTROL
        try:
            record = json.loads(path.read_text())
            writer, words = record["writer"], list(record["words"])
        except (OSError, ValueError, KeyError, TypeError) as cause:
            raise StaleSourceError(
                "the version is not on the disk",
                where=where,
                seen=str(cause),
                expected=str(path),
                fix="call stage(version) on every rank before the update; was it removed since?",
            ) from cause
        if writer != self._writer:
            raise StaleSourceError(
                "the version on the disk is another trainer's",
                where=str(path),
                seen=f"written by {writer}",
                expected=f"written by {self._writer}",
                fix="call stage(version) on every rank first; connect with the manifest of the trainer that is there",
            )
        self._adopt(words, self.pieces, where=str(path))


class DiskImporter:
    """Engine side; see the module's text."""

    def __init__(self, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> None:
        """Remember what is needed."""
        self._device = device
        self._records = needed_records(sources, needed)
        self._buffers: dict[BufferKey, torch.Tensor] = {}

    def open(self) -> Mapping[BufferKey, torch.Tensor]:
        """Allocate the buffers on the engine's device."""
        for key, record in self._records.items():
            dtype = DTYPES[record["dtype"]]
            self._buffers[key] = torch.empty(int(record["numel"]), dtype=dtype, device=self._device)
        return self._buffers

    def control(self, source: dict[str, Any]) -> ControlReader:
        """The control block, as it was when a version was sealed."""
        record: dict[str, Any] = next(iter(source["buffers"].values()), {})
        folder, writer = _handle(record), str(record["handle"].get("writer"))
        return DiskControl(folder, writer, int(source["rank"]), int(source["control"]["pieces"]))

    def fetch(self, version: int) -> None:
        """Read a version into the buffers.

        Raises:
            StaleSourceError: If it is not there.
            TransportError: If it is not what the manifest says.
        """
        for key, buffer in self._buffers.items():
            path = version_folder(_handle(self._records[key]), key[0], version) / BUFFERS
            read_buffer(path, key[1], buffer)

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def read_buffer(path: Path, name: str, into: torch.Tensor) -> None:
    """Read one buffer of a version.

    Raises:
        StaleSourceError: If the file is not there.
        TransportError: If it is truncated, or holds something else.
    """
    try:
        with safe_open(path, framework="pt", device=str(into.device)) as file:
            stored = file.get_tensor(name)
    except FileNotFoundError as cause:
        raise StaleSourceError("the version is not on the disk", where=str(path), fix="stage it again") from cause
    except (OSError, SafetensorError) as cause:
        raise TransportError("a version cannot be read", where=f"{path}, {name}", seen=str(cause)) from cause
    if stored.shape != into.shape or stored.dtype != into.dtype:
        raise TransportError(
            "a buffer on the disk is not the one that the manifest describes",
            where=f"{path}, {name}",
            seen=f"{stored.dtype} {tuple(stored.shape)}",
            expected=f"{into.dtype} {tuple(into.shape)}",
        )
    into.copy_(stored)


def _handle(record: Mapping[str, Any]) -> Path:
    handle = record.get("handle")
    if not isinstance(handle, dict) or not isinstance(handle.get("folder"), str):
        raise TransportError("malformed handle", where="disk transport", seen=repr(handle)[:80])
    return Path(handle["folder"])
