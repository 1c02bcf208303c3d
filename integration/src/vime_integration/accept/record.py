"""What a stage of the acceptance reports, and how it is judged.

A stage measures (``figures``), compares some of it with what it should be (``thresholds``), and passes when every
comparison holds. A stage that this machine cannot make at all is skipped with the reason; one that broke has an error.
Nothing else exists: there is no stage that passes because it was not made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from vime_devices import Platform

PlatformName = Literal["rocm", "cuda", "cpu"]
PLATFORMS: Mapping[str, Platform] = {"rocm": Platform.HIP, "cuda": Platform.CUDA, "cpu": Platform.CPU}


class Outcome(StrEnum):
    """How a stage ended."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Threshold:
    """One comparison.

    Attributes:
        name: What was compared.
        seen: What was found, with its unit.
        expected: What it has to be.
        holds: Whether it is.
    """

    name: str
    seen: str
    expected: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What a stage's function returns.

    Attributes:
        thresholds: Its comparisons.
        figures: What it measured: JSON values.
        notes: What a reader must know to read them, such as that something was emulated.
        skipped: Why it was not made; empty where it was.
    """

    thresholds: Sequence[Threshold] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage as the manifest holds it.

    Attributes:
        name: The stage.
        outcome: How it ended.
        seconds: How long it took.
        reason: Why it was skipped or failed; empty where it passed.
        report: What it said; empty where it broke.
        log: Its log file, relative to the manifest.
    """

    name: str
    outcome: Outcome
    seconds: float
    reason: str
    report: Report
    log: str

    def to_json(self) -> dict[str, Any]:
        """Return the stage as JSON values."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "seconds": round(self.seconds, 2),
            "reason": self.reason,
            "thresholds": [asdict(threshold) for threshold in self.report.thresholds],
            "figures": dict(self.report.figures),
            "notes": list(self.report.notes),
            "log": self.log,
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What is accepted, and how thoroughly.

    Attributes:
        platform: Whose hardware.
        gpus: How many GPUs the runs use; 0 for all that are visible, and on a CPU.
        out: Folder of the manifest, the page, the logs and the runs.
        steps: Steps of each GRPO run.
        sync_mb: Megabytes of weights in the sync bench; 0 takes the shape of Qwen3-8B.
        patience: Factor on every deadline.
    """

    platform: PlatformName
    gpus: int
    out: Path
    steps: int = 20
    sync_mb: int = 0
    patience: float = 1.0

    @property
    def devices(self) -> Platform:
        """The platform as vime-devices calls it."""
        return PLATFORMS[self.platform]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for the process of a stage."""
        return asdict(self) | {"out": str(self.out)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Acceptance:
        """Rebuild what ``to_json`` wrote."""
        return cls(**{**data, "out": Path(data["out"])})


def report_from_json(data: Mapping[str, Any]) -> Report:
    """Rebuild a report that a stage's process wrote."""
    thresholds = tuple(Threshold(**item) for item in data["thresholds"])
    return Report(thresholds, data["figures"], tuple(data["notes"]), data["skipped"])
