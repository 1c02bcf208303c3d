"""The control block: a page of shared memory in which a trainer rank says what its buffers hold right now.

Messages tell an engine *that* a version is ready; the block is how the engine checks that it *is*, at the moment it
reads, and that it stayed so until it had read everything. It is a seqlock: the publisher makes the sequence odd,
changes buffers and digests, writes the version, and makes the sequence even again. A reader takes the sequence before
and after; an odd or changed one means that it saw a mix, and the update is aborted. A trainer killed in mid-write
leaves it odd for ever, which is what we want.

The block lives in POSIX shared memory and is used by every same-host transport, also where the bulk bytes are in device
memory. Layout, little-endian int64 words::

    0 magic   1 format   2 sequence   3 version   4 digest mode   5 phase   6 closed   7 pieces   8.. digests, 2 a piece
"""

from __future__ import annotations

import mmap
import os
import secrets
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_sync.digest import Digest, DigestMode, Sums
from vime_sync.errors import StaleSourceError, TransportError
from vime_sync.process import identity, namespace, start_time

MAGIC = 0x56494D4553594E43
FORMAT = 1
_HEADER = 8
_MODES: tuple[DigestMode, ...] = ("off", "sampled", "full")
SHM = Path("/dev/shm")  # noqa: S108 (POSIX shared memory of Linux, not a temporary file)
PREFIX = "vime-"
Words = np.ndarray[Any, np.dtype[np.int64]]


class Segment:
    """A named POSIX shared-memory segment, mapped into this process.

    The creator owns the name and removes it on close, or when it ends without one; mappings that others hold stay valid
    until they drop them, so a reader never faults because a trainer went away. A creator that is killed leaves the name
    behind, for `sweep`.
    """

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        """Create or open a segment.

        Args:
            name: Name without a slash.
            size: Bytes; when opening, the least that must be there.
            create: Whether this process makes it.

        Raises:
            TransportError: If it cannot be created (no space, name taken).
            StaleSourceError: If it is not there, or shorter than the manifest says.
        """
        if not name.startswith(PREFIX) or "/" in name:
            raise TransportError("not a segment name of ours", seen=repr(name), expected=f"{PREFIX}<hex>")
        self.name, self.size = name, size
        path = SHM / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create else os.O_RDONLY
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as cause:
            if create:
                raise TransportError("cannot create shared memory", where=str(path), seen=str(cause)) from cause
            raise StaleSourceError(
                "the trainer's shared memory is gone",
                where=str(path),
                seen=str(cause),
                fix="publish again and connect again",
            ) from cause
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._remove = weakref.finalize(self, _remove, path, os.getpid()) if create else None
        if create:
            self._reserve(fd)
        else:
            self.check_size()
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if create else 0)
        self._map = mmap.mmap(fd, max(size, 1), flags=mmap.MAP_SHARED, prot=prot)

    def _reserve(self, fd: int) -> None:
        """Allocate the pages now: a full /dev/shm must be an error here, not a SIGBUS on the first write."""
        try:
            os.posix_fallocate(fd, 0, max(self.size, 1))
        except OSError as cause:
            self.close()
            raise TransportError(
                "not enough shared memory",
                where=str(SHM),
                seen=str(cause),
                expected=f"{self.size} bytes",
                fix="enlarge /dev/shm (docker: --shm-size or --ipc=host)",
            ) from cause

    def check_size(self) -> None:
        """Reader: fail if the segment has shrunk since it was mapped; reading past its end would kill this process.

        Raises:
            StaleSourceError: If it is shorter than what was mapped.
        """
        size = os.fstat(self._fd).st_size
        if size < self.size:
            raise StaleSourceError(
                "a shared-memory segment is truncated",
                where=str(SHM / self.name),
                seen=f"{size} bytes",
                expected=f"{self.size} bytes",
                fix="publish again and connect again",
            )

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> torch.Tensor:
        """A flat tensor over the mapping (of a read-only one: never write it).

        Args:
            dtype: Element type.
            numel: Elements.
            offset: First byte.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def close(self) -> None:
        """Give up the name (creator). The mapping goes when the last tensor over it does."""
        if self._remove is not None:
            self._remove()


def _remove(path: Path, owner: int) -> None:
    """Remove a segment's name, unless this is a child that its owner forked."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def segment_name() -> str:
    """A fresh, unguessable segment name that tells which process made it."""
    me = identity()
    return f"{PREFIX}{me['namespace']}-{me['pid']}-{me['start']}-{secrets.token_hex(8)}"


def sweep() -> int:
    """Remove segments that processes of this pid namespace left behind when they were killed.

    Returns:
        How many were removed. Those of other users are left to them.
    """
    here = f"{PREFIX}{namespace()}-"
    removed = 0
    for path in SHM.glob(f"{here}*"):
        pid, start, _ = path.name.removeprefix(here).split("-")
        if start_time(int(pid)) != int(start):
            try:
                path.unlink()
            except (FileNotFoundError, PermissionError):
                continue
            removed += 1
    return removed


class ControlReader:
    """What a reader asks of a control block, wherever its words are kept.

    Attributes:
        pieces: How many digests it holds.
    """

    pieces: int
    _words: Words

    def _load(self, version: int, where: str) -> None:
        """Bring the words up to date; shared memory is."""

    @property
    def closed(self) -> bool:
        """Whether the publisher closed."""
        return bool(self._words[6])

    def check(self, version: int, *, where: str) -> int:
        """Reader: the sequence, if the buffers hold `version` and are at rest.

        Args:
            version: The version that must be there.
            where: For the error: which rank.

        Returns:
            The sequence; pass it to `recheck` after reading.

        Raises:
            StaleSourceError: If the publisher closed, is in mid-write or holds another version.
        """
        self._load(version, where)
        sequence, held = int(self._words[2]), int(self._words[3])
        if self.closed:
            raise StaleSourceError("the publisher is closed", where=where, fix="publish again and connect again")
        if sequence % 2:
            raise StaleSourceError(
                "the publisher is in the middle of a write",
                where=where,
                seen=f"sequence {sequence}",
                fix="stage() must return on every rank before an update; if that rank died, publish again",
            )
        if held != version:
            raise StaleSourceError(
                "the publisher holds another version",
                where=where,
                seen=str(held),
                expected=str(version),
                fix="call stage(version) on every rank before the update",
            )
        return sequence

    def at_rest(self) -> int:
        """Reader: the version that the buffers hold, or -1 while the publisher writes, or if it is closed."""
        return -1 if self.closed or int(self._words[2]) % 2 else int(self._words[3])

    @property
    def sequence(self) -> int:
        """Reader: the sequence now; it changes with every write."""
        return int(self._words[2])

    def recheck(self, sequence: int, *, where: str) -> None:
        """Reader: fail if anything was written since `check`.

        Raises:
            StaleSourceError: If the publisher wrote in between.
        """
        self._load(int(self._words[3]), where)
        if int(self._words[2]) != sequence:
            raise StaleSourceError(
                "the publisher wrote while an engine was reading",
                where=where,
                seen=f"sequence {int(self._words[2])}",
                expected=str(sequence),
                fix="do not stage or train in place before update() has returned",
            )

    def digests(self) -> tuple[DigestMode, int, list[Digest]]:
        """Reader: the mode, the phase and the digest of each piece."""
        mode, phase, sums = self.sums()
        return mode, phase, [Digest(first, second) for first, second in sums.tolist()]

    def sums(self) -> tuple[DigestMode, int, Sums]:
        """Reader: the mode, the phase, and the digests as uint64 [pieces, 2]."""
        words = self._words[_HEADER:].view(np.uint64).reshape(-1, 2).copy()
        return _MODES[int(self._words[4])], int(self._words[5]), words

    def words(self) -> list[int]:
        """All words, as a transport that cannot share memory carries them."""
        return [int(word) for word in self._words]

    def _adopt(self, words: Sequence[int], pieces: int, *, where: str) -> None:
        """Take words that a transport brought.

        Raises:
            StaleSourceError: If they are not those of a block of so many pieces.
        """
        if len(words) != _HEADER + 2 * pieces or words[0] != MAGIC or words[1] != FORMAT or words[7] != pieces:
            raise StaleSourceError("not the control block that the manifest describes", where=where)
        self.pieces, self._words = pieces, np.array(words, dtype=np.int64)


class ControlBlock(ControlReader):
    """One rank's control block; see the module's text."""

    def __init__(self, name: str, pieces: int, *, create: bool) -> None:
        """Create or open a block for `pieces` piece digests.

        Raises:
            StaleSourceError: If the block is not there or not ours.
        """
        self.pieces = pieces
        words = _HEADER + 2 * pieces
        self._segment = Segment(name, 8 * words, create=create)
        self._words = self._segment.tensor(torch.int64, words).numpy()
        if create:
            self._words[:] = 0
            self._words[3] = -1
            self._words[7] = pieces
            self._words[1] = FORMAT
            self._words[0] = MAGIC
        elif int(self._words[0]) != MAGIC or int(self._words[1]) != FORMAT or int(self._words[7]) != pieces:
            raise StaleSourceError("not the control block that the manifest describes", where=name)

    @property
    def name(self) -> str:
        """The segment's name."""
        return self._segment.name

    def begin(self) -> None:
        """Publisher: the buffers are about to change."""
        if int(self._words[2]) % 2 == 0:
            self._words[2] += 1

    def finish(self, version: int, mode: DigestMode, phase: int, sums: Sums) -> None:
        """Publisher: the buffers hold `version`, whole.

        Args:
            version: What they hold.
            mode: How the digests were made.
            phase: The sampling phase they were made with.
            sums: uint64 [pieces, 2], in the order of the rank's manifest; no rows when `mode` is off.
        """
        if len(sums):
            self._words[_HEADER:] = sums.reshape(-1).view(np.int64)
        self._words[3], self._words[4], self._words[5] = version, _MODES.index(mode), phase
        self._words[2] += 1

    def close(self) -> None:
        """Publisher: tell readers that nothing more will come, and remove the name."""
        self._words[6] = 1
        self._segment.close()
