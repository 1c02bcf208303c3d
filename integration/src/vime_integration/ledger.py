"""The ledger of prompts: for each step, what became of every prompt that was settled in it.

A prompt is named by its position in the walk over the data, which is unique in a run. It is settled once: *trained* in
one step, or *dropped* with a reason. *Replayed* prompts were in flight, or too old, and are generated again; they are
settled later. ``prompts.jsonl`` in the run folder holds one object a step; after a resume it holds exactly the steps up
to the one that was resumed after, as the metrics do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime_integration.errors import PipelineError


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
        PipelineError: The file cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Cut the file to the step to go on after."""
        self._path = path
        kept = [] if resume_step is None else [row for row in read_ledger(path) if row["step"] <= resume_step]
        beside = path.with_name(path.name + ".new")
        try:
            beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, step: int, entry: LedgerEntry) -> None:
        """Append a step's entry.

        Raises:
            PipelineError: The disk refuses.
        """
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **entry.to_dict()}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> PipelineError:
        return PipelineError(
            "the ledger of prompts cannot be written",
            where=str(self._path),
            seen=str(error),
            fix="free space on the disk, then resume",
        )


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the entries of ``prompts.jsonl``, one object a step; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]
