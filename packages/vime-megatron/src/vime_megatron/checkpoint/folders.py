"""Folders that appear only when they are complete, and are known to be so.

A folder is built under a temporary name beside its target and flushed to disk; a target that exists is moved aside,
the new one renamed to its place, and the old one deleted last. A reader falls back to the one that was moved aside if
the machine died in between. ``manifest.json`` holds the size and SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vime_megatron.errors import CheckpointError
from vime_megatron.peers import Peers

FORMAT = 2
MANIFEST = "manifest.json"

# What writing raises when a disk is full or gone: torch's own writer says RuntimeError for it.
WRITE_ERRORS = (OSError, RuntimeError, ValueError, SafetensorError)


def together(peers: Peers, folder: Path, action: Callable[[], None]) -> None:
    """Run an action on every rank, and fail on all of them when it fails on one.

    Args:
        peers: The ranks; all must call.
        folder: For the error's text.
        action: What to do.

    Raises:
        CheckpointError: It failed on some rank.
    """
    problem, cause = "", None
    try:
        action()
    except WRITE_ERRORS as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    problems = peers.failures(problem)
    if problems:
        raise CheckpointError(
            "nothing was published, what was there stays valid",
            where=str(folder),
            seen="; ".join(problems),
            fix="free space on that file system, or check its permissions",
        ) from cause


def check_target(peers: Peers, folder: Path, mark: str) -> None:
    """Refuse to replace what is not of the kind that will be written: a mistyped name must not delete a home folder.

    Args:
        peers: The ranks; all must call.
        folder: The final name.
        mark: The file that tells the kind.

    Raises:
        CheckpointError: Something else is there; raised on all ranks, and nothing was touched.
    """
    problem = ""
    if peers.rank == 0 and folder.exists():
        inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ["(a file)"]
        if inside and mark not in inside:
            problem = f"no {mark} in it, but {', '.join(inside[:4])}" + (" and more" if len(inside) > 4 else "")
    problems = peers.failures(problem)
    if problems:
        raise CheckpointError(
            "there is something else in this place",
            where=str(folder),
            seen="; ".join(problems),
            expected=f"nothing, an empty folder, or one with {mark}, which would be replaced",
            fix="give another name, or move away what is there; nothing was touched",
        )


def temporary_of(folder: Path) -> Path:
    """Return where a folder is built."""
    return folder.with_name(f".{folder.name}.writing")


def publish(peers: Peers, folder: Path, *phases: Callable[[Path], None]) -> None:
    """Let every rank write into a temporary folder, then make it appear as ``folder``.

    Args:
        peers: The ranks; all must call.
        folder: The final name.
        phases: Called one after the other with the temporary folder, on every rank; a phase starts when the one before
            has succeeded on all.

    Raises:
        CheckpointError: A rank failed; raised on all, and nothing was published.
    """
    temporary = temporary_of(folder)
    first = peers.rank == 0
    together(peers, folder, lambda: fresh(temporary) if first else None)
    try:
        for phase in phases:
            together(peers, folder, partial(phase, temporary))
        together(peers, folder, lambda: swap_in(temporary, folder) if first else None)
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def fresh(temporary: Path) -> None:
    """Make an empty folder."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def swap_in(temporary: Path, folder: Path) -> None:
    """Flush a folder to disk and give it its name."""
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def fingerprints(paths: Iterable[Path]) -> dict[str, Any]:
    """Return each file's size and SHA-256 by name."""
    found = {}
    for path in paths:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    return found


def check_files(peers: Peers, folder: Path, recorded: dict[str, Any]) -> None:
    """Compare a folder's files with the manifest's checksums; the ranks share the work.

    Args:
        peers: The ranks; all must call.
        folder: The checkpoint.
        recorded: Fingerprints by file name.

    Raises:
        CheckpointError: A file is missing or differs; raised on all ranks, and nothing was read.
    """
    problem = ""
    for name in sorted(recorded)[peers.rank :: peers.size]:
        path = folder / name
        seen = fingerprints([path])[name] if path.is_file() else "no such file"
        if seen != recorded[name]:
            problem = f"{name}: {seen}, expected {recorded[name]}"
            break
    problems = peers.failures(problem)
    if problems:
        raise CheckpointError(
            "a checkpoint file is damaged",
            where=str(folder),
            seen="; ".join(problems),
            fix="load an older checkpoint; nothing was loaded",
        )


def find(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder to read and its manifest; falls back to one that a dying save had moved aside.

    Raises:
        CheckpointError: There is no checkpoint, or none of this format.
    """
    for candidate in (folder, _aside(folder)):
        path = candidate / MANIFEST
        if not path.is_file():
            continue
        try:
            manifest = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError("the manifest is not JSON", where=str(path), seen=str(error)) from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            seen = f"format {manifest.get('format')!r}" if isinstance(manifest, dict) else type(manifest).__name__
            raise CheckpointError("unknown checkpoint format", where=str(path), seen=seen, expected=f"format {FORMAT}")
        return candidate, manifest
    raise CheckpointError(
        "no valid checkpoint",
        where=str(folder),
        seen="no such folder" if not folder.exists() else f"no {MANIFEST} in it",
        fix="give the folder that save() published; nothing was loaded",
    )


def numbered(folder: Path) -> tuple[str, int]:
    """Split a folder's name into what is before the number at its end, and the number.

    Raises:
        CheckpointError: There is no number to tell newer from older by.
    """
    found = re.fullmatch(r"(.*?)(\d+)", folder.name)
    if found is None:
        raise CheckpointError(
            "cannot tell which checkpoints are older",
            where=str(folder),
            seen=f"the name {folder.name!r}",
            expected="a name that ends in a number, such as step-000100",
            fix="name the folder so, or leave keep out and delete old ones yourself",
        )
    return found[1], int(found[2])


def keep_newest(folder: Path, keep: int) -> list[Path]:
    """Delete older checkpoints beside one.

    Args:
        folder: The one just published. Only folders beside it whose names differ from its name in the number at the
            end, by a lower number, and that hold a checkpoint's manifest, are counted or touched. (Higher numbers are
            of a run that went on from there once; they are for its owner to judge.)
        keep: How many to keep, the one just published included.

    Returns:
        What was deleted.
    """
    stem, number = numbered(folder)
    older = []
    for path in folder.parent.iterdir():
        alike = re.fullmatch(re.escape(stem) + r"(\d+)", path.name)
        if alike is not None and int(alike[1]) < number and (path / MANIFEST).is_file():
            older.append((int(alike[1]), path))
    old = [path for _, path in sorted(older, reverse=True)[keep - 1 :]]
    for path in old:
        gone = path.with_name(f".{path.name}.deleting")  # a delete that dies leaves nothing that looks whole
        path.rename(gone)
        shutil.rmtree(gone)
    return old


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
