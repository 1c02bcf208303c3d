"""Samples worth reading: of every step the best and the worst, kept as text beside the metrics.

A curve says that the reward rises; only the samples say what is rewarded. One line of ``samples.jsonl`` is one sample,
with its step, whether it was among the best or the worst, its reward and the verifier's reason.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from vime_grpo.errors import MetricsError
from vime_grpo.step_file import StepFile, read_steps

#: Longest text that is kept; of a longer one the middle is left out.
MAX_CHARACTERS = 20_000


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One sample as text.

    Attributes:
        rank: Among the ``best`` or the ``worst`` of its step.
        reward: Its score.
        prompt: The prompt as text.
        response: The response as text.
        group: Identity of its group.
        index: Which sample of the group.
        reason: The verifier's reason for the score.
        label: The reference answer.
        status: How generation ended.
        tokens: Tokens of the response.
    """

    rank: Literal["best", "worst"]
    reward: float
    prompt: str
    response: str
    group: str
    index: int
    reason: str = ""
    label: str | None = None
    status: str = ""
    tokens: int = 0


def extremes(rewards: Sequence[float], groups: Sequence[Hashable], keep: int) -> tuple[list[int], list[int]]:
    """Choose the best and the worst samples of a step, each of another prompt as far as there are enough.

    Args:
        rewards: One per sample.
        groups: Identity of each sample's group.
        keep: How many of each.

    Returns:
        Positions of the best, best first, and of the worst, worst first. No sample is in both; of equal rewards the
        earlier one is taken.
    """
    best = _first_of_groups(sorted(range(len(rewards)), key=lambda i: (-rewards[i], i)), groups, keep)
    rest = [i for i in sorted(range(len(rewards)), key=lambda i: (rewards[i], i)) if i not in set(best)]
    return best, _first_of_groups(rest, groups, keep)


def _first_of_groups(order: Sequence[int], groups: Sequence[Hashable], keep: int) -> list[int]:
    seen: set[Hashable] = set()
    first: list[int] = []
    again: list[int] = []
    for position in order:
        (again if groups[position] in seen else first).append(position)
        seen.add(groups[position])
    chosen = set([*first, *again][:keep])
    return [position for position in order if position in chosen]


def read_samples(path: str | Path) -> list[tuple[int, SampleRecord]]:
    """Read a samples file.

    Args:
        path: ``samples.jsonl``.

    Returns:
        Step and sample, in order.

    Raises:
        MetricsError: The file cannot be read, or a line is not a sample; names file and line.
    """
    known = {field.name for field in fields(SampleRecord)}
    records = []
    for number, row in enumerate(read_steps(path, "samples"), start=1):
        step = row.pop("step")
        try:
            # Further keys are of a later version; what this one knows can still be read.
            records.append((step, SampleRecord(**{key: value for key, value in row.items() if key in known})))
        except TypeError as error:
            raise MetricsError("not a sample", where=f"{path}, line {number}", seen=str(error)) from error
    return records


class SamplesWriter:
    """Appends the chosen samples of each step; flushed to the disk each time.

    Args:
        path: ``samples.jsonl``; its folder is made.
        resume_step: Continue a file after this step: samples of later steps are cut off. None starts an empty file.

    Raises:
        MetricsError: The file cannot be read or written.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        """Open the file, cut to the step to resume after."""
        self.path = Path(path)
        kept: list[dict[str, Any]] = []
        if resume_step is not None and self.path.exists():
            # Unlike metrics, samples may have been off until now: a file that does not reach the step is no fault.
            kept = [row for row in read_steps(self.path, "samples") if row["step"] <= resume_step]
        self._last = int(kept[-1]["step"]) if kept else None
        self._file = StepFile(self.path, "samples", kept)

    def write(self, step: int, records: Sequence[SampleRecord]) -> None:
        """Append the samples of a step.

        Args:
            step: Number of the step; above the last one.
            records: The chosen samples.

        Raises:
            MetricsError: The step does not follow, a reward is not finite, or the disk refuses.
        """
        if self._last is not None and step <= self._last:
            raise MetricsError("steps must increase", where=str(self.path), seen=f"{step} after {self._last}")
        rows = []
        for record in records:
            if not math.isfinite(record.reward):
                where = f"step {step}, sample {record.index} of group {record.group}"
                raise MetricsError("a reward is no finite number", where=where, seen=repr(record.reward))
            texts = {"prompt": shorten(record.prompt), "response": shorten(record.response)}
            rows.append({"step": step, **asdict(record), **texts})
        self._file.append(rows)
        self._last = step

    def close(self) -> None:
        """Close the file; writing is over."""
        self._file.close()

    def __enter__(self) -> SamplesWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()


def shorten(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text of at most about ``most`` characters, with a note where its middle was left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
