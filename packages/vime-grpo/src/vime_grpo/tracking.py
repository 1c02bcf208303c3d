"""The metrics file of a run: one JSON object a step, on disk before the next step begins.

Invariants: steps increase strictly; every line is a whole object with finite numbers; after a resume at step n the
file holds exactly the steps up to n, so a step that is run again is not there twice. A line that a crash cut short can
only be the last one, and only that one is dropped: a broken line elsewhere is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from vime_grpo.errors import MetricsError


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read a metrics file.

    Args:
        path: ``metrics.jsonl``.

    Returns:
        One dictionary a step, in order. A last line without its end is left out.

    Raises:
        MetricsError: The file cannot be read, or a line is not a metrics object; names file and line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError("the metrics file cannot be read", where=str(file), seen=str(error)) from error
    *lines, _torn = text.split("\n")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise MetricsError("not JSON", where=where, seen=line[:80], fix="remove the line") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise MetricsError("not a step's metrics", where=where, seen=line[:80], expected='an object with "step"')
        rows.append(row)
    return rows


class MetricsWriter:
    """Appends one object a step; flushed to the disk each time.

    Args:
        path: ``metrics.jsonl``; its folder is made.
        resume_step: Continue a file after this step: later steps are cut off. None starts an empty file.

    Raises:
        MetricsError: The file cannot be written, or to be resumed it lacks the step.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        """Open the file, cut to the step to resume after."""
        self.path = Path(path)
        self._last: int | None = None
        kept = [] if resume_step is None else self._kept(resume_step)
        if kept:
            self._last = int(kept[-1]["step"])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and moved over: a crash in the middle leaves the old file or the cut one, never a part.
            beside = self.path.with_name(self.path.name + ".new")
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(_line(row) for row in kept)
                _to_disk(file)
            beside.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(error) from error

    def _kept(self, resume_step: int) -> list[dict[str, float]]:
        kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step] if self.path.exists() else []
        last = kept[-1]["step"] if kept else 0
        if resume_step > 0 and last != resume_step:
            raise MetricsError(
                "the metrics file does not reach the step to resume after",
                where=str(self.path),
                seen=f"last step {last}" if kept else "no steps",
                expected=f"step {resume_step}",
                fix="resume from a checkpoint that the file covers, or start a fresh run",
            )
        return kept

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step.

        Args:
            step: Number of the step; above the last one.
            metrics: Finite numbers by name.

        Raises:
            MetricsError: The step does not follow, a value is no finite number (it is named), or the disk refuses.
        """
        if self._last is not None and step <= self._last:
            raise MetricsError("steps must increase", where=str(self.path), seen=f"{step} after {self._last}")
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise MetricsError("a metric is no finite number", where=f"step {step}, {name}", seen=repr(value))
        try:
            self._file.write(_line({"step": step, **metrics}))
            _to_disk(self._file)
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        self._last = step

    def _failed(self, error: Exception) -> MetricsError:
        fix = "free space on the disk or choose another pipeline.run_dir, then resume"
        return MetricsError("the metrics file cannot be written", where=str(self.path), seen=str(error), fix=fix)

    def close(self) -> None:
        """Close the file; writing is over."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()


def _line(row: Mapping[str, float]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _to_disk(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
