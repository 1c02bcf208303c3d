"""What a check says, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

LABEL_WIDTH = 28


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check.

    Attributes:
        label: Its stable name; the exit message lists those that failed.
        status: How it ended.
        seen: What was found. For a skipped check: why it could not be made.
        expected: What would have been right.
    """

    label: str
    status: Status
    seen: str
    expected: str

    def line(self) -> str:
        """Return the result as one line."""
        text = f"{self.status.value:<4}  {self.label:<{LABEL_WIDTH}}  seen: {self.seen}; expected: {self.expected}"
        return " ".join(text.splitlines())


def passed(label: str, good: bool, seen: str, expected: str) -> Result:
    """Return a result that is ok or failed."""
    return Result(label, Status.OK if good else Status.FAIL, seen, expected)


def skipped(label: str, why: str, expected: str) -> Result:
    """Return a result that could not be had here, and why."""
    return Result(label, Status.SKIP, f"not checked: {why}", expected)


def as_json(results: Iterable[Result], platform: str) -> str:
    """Render results for programs.

    Args:
        results: All results.
        platform: The platform that was verified.

    Returns:
        A JSON object with ``platform``, ``failed`` (labels) and ``results``.
    """
    rows = list(results)
    failed = [row.label for row in rows if row.status is Status.FAIL]
    return json.dumps({"platform": platform, "failed": failed, "results": [asdict(row) for row in rows]}, indent=2)
