"""The ledger of prompts: for each step, what became of every prompt that was settled in it.

A prompt is named by its position in the walk over the data, which is unique in a run. It is settled once: *trained* in
one step, or *dropped* with a reason. *Replayed* prompts were in flight, or too old, and are generated again; they are
settled later. ``prompts.jsonl`` in the run folder holds one object a step; after a resume it holds exactly the steps up
to the one that was resumed after, as the metrics do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from vime_grpo import StepFile, read_steps

_CONTENT = "prompts"


@dataclass(slots=True)
class LedgerEntry:
    """What became of prompts between two batches.

    Attributes:
        trained: Positions of the prompts of this step's batch.
        dropped: Positions of prompts that were given up, each with the reason.
        replayed: Positions of prompts that are generated again, each with the reason.
    """

    trained: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    replayed: list[tuple[int, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"trained": self.trained, "dropped": self.dropped, "replayed": self.replayed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LedgerEntry:
        """Rebuild what ``to_dict`` returned."""
        pairs = {
            kind: [(int(position), str(why)) for position, why in values[kind]] for kind in ("dropped", "replayed")
        }
        return cls(list(values["trained"]), pairs["dropped"], pairs["replayed"])


class Ledger:
    """Appends one entry a step to ``prompts.jsonl``; on disk before the next step begins.

    Args:
        path: The file.
        resume_step: Keep the steps up to this one; None begins an empty file.

    Raises:
        MetricsError: The file cannot be read or written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Cut the file to the step to go on after."""
        kept = [] if resume_step is None else [row for row in read_ledger(path) if row["step"] <= resume_step]
        self._file = StepFile(path, _CONTENT, kept)

    def write(self, step: int, entry: LedgerEntry) -> None:
        """Append a step's entry.

        Raises:
            MetricsError: The disk refuses.
        """
        self._file.append([{"step": step, **entry.to_dict()}])

    def close(self) -> None:
        """Close the file; writing is over."""
        self._file.close()

    def __enter__(self) -> Ledger:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        self.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the entries of ``prompts.jsonl``, one object a step; a last line that a crash cut short is left out.

    Raises:
        MetricsError: A line is no entry; names file and line.
    """
    return read_steps(path, _CONTENT) if path.exists() else []
