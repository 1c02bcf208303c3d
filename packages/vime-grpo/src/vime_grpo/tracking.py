"""The metrics file of a run: one JSON object a step, on disk before the next step begins.

Steps increase strictly and values are finite; what else holds is in :mod:`vime_grpo.step_file`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from vime_grpo.errors import MetricsError
from vime_grpo.step_file import StepFile, read_steps


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read a metrics file.

    Args:
        path: ``metrics.jsonl``.

    Returns:
        One dictionary a step, in order. A last line without its end is left out.

    Raises:
        MetricsError: The file cannot be read, or a line is not a metrics object; names file and line.
    """
    return read_steps(path, "metrics")


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
        kept = [] if resume_step is None else self._kept(resume_step)
        self._last = int(kept[-1]["step"]) if kept else None
        self._file = StepFile(self.path, "metrics", kept)

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
        self._file.append([{"step": step, **metrics}])
        self._last = step

    def close(self) -> None:
        """Close the file; writing is over."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()
