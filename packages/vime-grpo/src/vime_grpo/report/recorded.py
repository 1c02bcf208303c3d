"""What a run left behind in its folder, read for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vime_grpo.errors import ReportError
from vime_grpo.samples import SampleRecord, read_samples
from vime_grpo.timeline import Span, read_timeline
from vime_grpo.tracking import read_metrics


@dataclass(frozen=True)
class RecordedRun:
    """A run, as far as it has come.

    Attributes:
        name: Name of its folder.
        metrics: Metrics of each step, in order; at least one.
        samples: Step and sample, in order; empty where none were kept.
        timeline: When each phase began and ended; empty in runs of before there was one.
        config: Text of the resolved configuration, or empty.
    """

    name: str
    metrics: Sequence[dict[str, float]]
    samples: Sequence[tuple[int, SampleRecord]]
    timeline: Sequence[Span]
    config: str

    def extremes(self, keep: int) -> tuple[list[tuple[int, SampleRecord]], list[tuple[int, SampleRecord]]]:
        """Return the samples with the highest and with the lowest reward of the whole run.

        Args:
            keep: How many of each, at most.

        Returns:
            Step and sample; of equal rewards the later step, for it shows what the policy has become.
        """
        best = sorted((item for item in self.samples if item[1].rank == "best"), key=lambda i: (-i[1].reward, -i[0]))
        worst = sorted((item for item in self.samples if item[1].rank == "worst"), key=lambda i: (i[1].reward, -i[0]))
        return best[:keep], worst[:keep]

    def over_time(self, count: int) -> list[tuple[int, list[SampleRecord]]]:
        """Return the samples of a few steps, evenly spaced from the first step that has any to the last."""
        steps = sorted({step for step, _ in self.samples})
        if len(steps) > count > 1:
            steps = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
        return [(step, [record for at, record in self.samples if at == step]) for step in steps[:count]]


def read_run(folder: str | Path) -> RecordedRun:
    """Read a run folder.

    Args:
        folder: The folder; ``metrics.jsonl`` must be there; ``samples.jsonl``, ``phases.jsonl`` and ``config.toml``
            may be.

    Raises:
        ReportError: It is no run folder, or no step is finished yet.
        MetricsError: A file cannot be read; names the line.
    """
    root = Path(folder).absolute()
    metrics, samples, config = root / "metrics.jsonl", root / "samples.jsonl", root / "config.toml"
    phases = root / "phases.jsonl"
    if not metrics.is_file():
        raise ReportError(
            "not a run folder",
            where=str(root),
            seen="no metrics.jsonl" if root.is_dir() else "no such folder",
            expected="a folder that `vime-grpo train` made",
        )
    rows = read_metrics(metrics)
    if not rows:
        raise ReportError("the run has no finished step yet", where=str(metrics), fix="wait for the first step")
    return RecordedRun(
        name=root.name,
        metrics=rows,
        samples=read_samples(samples) if samples.is_file() else (),
        timeline=read_timeline(phases) if phases.is_file() else (),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )
