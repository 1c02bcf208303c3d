"""What came of every check, one record each, the newest only.

A record says what was run, when, from which commit and on what; it is never written for a check that was not made,
unless it was skipped, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vime_matrix.definition import FOLDER

PATH = FOLDER / "results.json"
Outcome = Literal["passed", "refused", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Record:
    """One check.

    Attributes:
        environment: Where: ``py3.12-0.32-newest``.
        check: What: ``light``, ``megatron``, ``interface``, or a pipeline such as ``colocated-dense-1``.
        outcome: What came of it; ``refused`` is a run that ended in the refusal which the definition expects.
        date: The day, ISO 8601.
        commit: What of vime was run.
        machine: On what.
        seconds: How long it took.
        detail: Figures of a check that passed, the reason of any other.
    """

    environment: str
    check: str
    outcome: Outcome
    date: str
    commit: str
    machine: str
    seconds: float
    detail: str


def read(path: Path = PATH) -> dict[tuple[str, str], Record]:
    """Return the records by environment and check; none where nothing was run yet."""
    if not path.is_file():
        return {}
    records = [Record(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
    return {(record.environment, record.check): record for record in records}


def keep(record: Record, path: Path = PATH) -> None:
    """Put a record in the place of the one before it; a skip does not displace a run.

    Args:
        record: The new one.
        path: The file.
    """
    records = read(path)
    former = records.get((record.environment, record.check))
    if record.outcome == "skipped" and former is not None and former.outcome != "skipped":
        return
    records[record.environment, record.check] = record
    _write(records, path)


def withdraw(checks: Iterable[tuple[str, str]], path: Path = PATH) -> None:
    """Take back skips whose reason is gone.

    Args:
        checks: Environment and check of what can be made now.
        path: The file.
    """
    records = read(path)
    stale = [key for key in checks if key in records and records[key].outcome == "skipped"]
    for key in stale:
        del records[key]
    if stale:
        _write(records, path)


def _write(records: Mapping[tuple[str, str], Record], path: Path) -> None:
    ordered = [asdict(records[key]) for key in sorted(records)]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
