"""Files of JSON objects that grow by whole steps, on disk before the next step begins.

Invariants: steps never decrease; every line is a whole object that names its step; after a resume at step n the file
holds exactly the steps up to n, so a step that is run again is not there twice. A line that a crash cut short can only
be the last one, and only that one is dropped: a broken line elsewhere is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vime_grpo.errors import MetricsError


def read_steps(path: str | Path, content: str) -> list[dict[str, Any]]:
    """Read a file of steps.

    Args:
        path: The file.
        content: What it holds, for errors: ``"metrics"``.

    Returns:
        Its objects, in order. A last line without its end is left out.

    Raises:
        MetricsError: The file cannot be read, or a line is not an object with a step; names file and line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError(f"the {content} file cannot be read", where=str(file), seen=str(error)) from error
    *lines, _torn = text.split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise MetricsError("not JSON", where=where, seen=line[:80], fix="remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise MetricsError(f"not a step's {content}", where=where, seen=line[:80], expected='an object with "step"')
        rows.append(row)
    return rows


class StepFile:
    """An open file of steps.

    Args:
        path: The file; its folder is made.
        content: What it holds, for errors: ``"metrics"``.
        kept: The objects that it shall begin with.

    Raises:
        MetricsError: The file cannot be written.
    """

    def __init__(self, path: Path, content: str, kept: Sequence[Mapping[str, Any]]) -> None:
        """Write what is kept, and open the file to append."""
        self.path = path
        self._content = content
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and moved over: a crash in the middle leaves the old file or the cut one, never a part.
            beside = path.with_name(path.name + ".new")
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(_line(row) for row in kept)
                _to_disk(file)
            beside.replace(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the objects of one step in one piece, and wait until they are on the disk.

        Args:
            rows: Objects with their ``step``, JSON values; numbers are finite.

        Raises:
            MetricsError: The disk refuses, or the file is closed.
        """
        text = "".join(_line(row) for row in rows)
        try:
            self._file.write(text)
            _to_disk(self._file)
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the file; writing is over."""
        self._file.close()

    def _failed(self, error: Exception) -> MetricsError:
        fix = "free space on the disk or choose another pipeline.run_dir, then resume"
        return MetricsError(
            f"the {self._content} file cannot be written", where=str(self.path), seen=str(error), fix=fix
        )


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _to_disk(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
