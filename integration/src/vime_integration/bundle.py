"""Resume bundles: one atomic directory a save, with everything that a run needs to go on.

A bundle is written under a hidden name, flushed to disk, and renamed; one that goes is hidden before it is removed. So
at any moment, whatever is killed, a folder named ``step-NNNNNN`` is a whole bundle and the ones before it are
untouched; what a kill leaves under hidden names goes with the next save. Its ``bundle.json`` holds the pipeline's state
and the size and SHA-256 of every file in it; a bundle that does not match is refused with the file's name, and the next
older one is offered. Only after a new bundle stands are old ones removed, so the newest ``keep`` are there.

The write order (write, fsync files and folders, rename, fsync the parent) is what POSIX asks of a durable rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_integration.errors import BundleError, ResumeError

FORMAT = 1
STATE_FILE = "bundle.json"
PREFIX = "step-"
TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Bundle:
    """One complete save.

    Attributes:
        path: The folder.
        step: Number of finished steps when it was written.
        state: The pipeline's own state: data position, weight version, metrics position and so on.
    """

    path: Path
    step: int
    state: dict[str, Any]


class BundleStore:
    """Writes, finds and checks the bundles of one run.

    Args:
        root: The run's ``checkpoints`` folder.
        keep: How many of the newest to keep, at least 1.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        """Remember the folder."""
        self.root = root
        self.keep = keep

    def write(self, step: int, state: dict[str, Any], fill: Callable[[Path], None]) -> Bundle:
        """Write the bundle of ``step``.

        Args:
            step: Number of finished steps.
            state: JSON-compatible state of the pipeline.
            fill: Called with the hidden folder, to let the trainer ranks write their part into it.

        Raises:
            BundleError: It could not be written; nothing of it remains, and the bundles before it are untouched.
        """
        final = self.root / f"{PREFIX}{step:06d}"
        hidden = self.root / f"{TEMPORARY}{final.name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir()
            fill(hidden)
            record = {"format": FORMAT, "step": step, "state": state, "files": _inventory(hidden)}
            _write_durably(hidden / STATE_FILE, json.dumps(record, indent=1, sort_keys=True))
            _fsync_tree(hidden)
            self._hide(final)  # a resumed run reaches the same step again
            hidden.rename(final)
            _fsync_directory(self.root)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise BundleError(
                f"the checkpoint of step {step} could not be written: {error.strerror or error}",
                where=str(final),
                seen=f"{_free_gib(self.root):.2f} GiB free on that file system",
                expected="room for the model, the optimiser and the data state",
                fix=f"free space or set checkpoint.keep lower; {self._older_text()}",
            ) from error
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        self._prune()
        return Bundle(final, step, state)

    def steps(self) -> list[int]:
        """Steps of all bundles that stand, in rising order, unchecked."""
        found = [path.name.removeprefix(PREFIX) for path in self.root.glob(f"{PREFIX}*") if path.is_dir()]
        return sorted(int(name) for name in found if name.isdigit())

    def latest(self) -> Bundle:
        """Return the newest bundle, checked.

        Raises:
            ResumeError: There is none, or the newest is torn (the error then names the older one that is whole).
        """
        steps = self.steps()
        if not steps:
            raise ResumeError(
                "no checkpoint to resume from",
                where=str(self.root),
                seen="no step-NNNNNN folder: the run ended before its first save",
                expected="at least one complete bundle",
                fix="start the run afresh, or set checkpoint.every lower so that it saves earlier",
            )
        return self.open(steps[-1])

    def open(self, step: int) -> Bundle:
        """Return the bundle of ``step`` after comparing every file in it with its record.

        Raises:
            ResumeError: It is missing, unreadable, of another format, or a file differs from the record.
        """
        path = self.root / f"{PREFIX}{step:06d}"
        try:
            record = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._torn(path, step, f"{STATE_FILE} cannot be read: {error}") from error
        if record.get("format") != FORMAT:
            raise self._torn(path, step, f"format {record.get('format')!r}, this version reads {FORMAT}")
        seen = _inventory(path, leave_out=STATE_FILE)
        expected: dict[str, Any] = record["files"]
        for name in sorted(expected.keys() | seen.keys()):
            if seen.get(name) != expected.get(name):
                raise self._torn(path, step, f"{name}: {_difference(seen.get(name), expected.get(name))}")
        return Bundle(path, int(record["step"]), record["state"])

    def _torn(self, path: Path, step: int, seen: str) -> ResumeError:
        older = [other for other in self.steps() if other < step]
        fix = "start the run afresh"
        if older:
            fix = f"move {path.name} away to resume from step {older[-1]} ({PREFIX}{older[-1]:06d})"
        expected = "every file as it was recorded when the bundle was written"
        return ResumeError("the checkpoint is not whole", where=str(path), seen=seen, expected=expected, fix=fix)

    def _older_text(self) -> str:
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is still valid" if steps else "there is no earlier checkpoint"

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            self._hide(self.root / f"{PREFIX}{step:06d}")
        for hidden in self.root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(hidden)

    def _hide(self, bundle: Path) -> None:
        """Take a bundle's name away, if it has one, so that it may be removed piece by piece."""
        if bundle.exists():
            hidden = self.root / f"{TEMPORARY}old-{bundle.name}"
            shutil.rmtree(hidden, ignore_errors=True)
            bundle.rename(hidden)


def _inventory(folder: Path, leave_out: str = "") -> dict[str, dict[str, Any]]:
    """Relative name -> size in bytes and SHA-256 of every file under ``folder``."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != leave_out:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            files[name] = {"bytes": path.stat().st_size, "sha256": digest}
    return files


def _difference(seen: dict[str, Any] | None, expected: dict[str, Any] | None) -> str:
    if seen is None:
        return "missing"
    if expected is None:
        return "not in the record"
    if seen["bytes"] != expected["bytes"]:
        return f"{seen['bytes']} bytes, recorded {expected['bytes']}"
    return "its SHA-256 differs from the recorded one"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        elif path.is_dir():
            _fsync_directory(path)
    _fsync_directory(folder)


def _fsync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_gib(folder: Path) -> float:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free / 2**30
