"""The reward curve of a run as a picture, drawn from its metrics file."""

from __future__ import annotations

import json
from pathlib import Path

from vime_integration.metrics import DIFFERENCE

REWARD = "rollout/raw_reward"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the objects of a metrics file, one a step."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def plot_reward(metrics: Path, picture: Path) -> None:
    """Draw mean reward and logprob difference against the step.

    Args:
        metrics: ``metrics.jsonl`` of a run.
        picture: The PNG to write.
    """
    from matplotlib.figure import Figure  # a second of imports that only the end of a run needs

    rows = [row for row in read_metrics(metrics) if REWARD in row]
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    reward = figure.add_subplot()
    reward.plot(steps, [row[REWARD] for row in rows], color="#1f6f8b", linewidth=2, marker="o", markersize=3)
    reward.set_xlabel("step")
    reward.set_ylabel("mean reward", color="#1f6f8b")
    reward.set_ylim(-0.02, 1.02)
    reward.grid(alpha=0.3)
    shown = [(row["step"], row[DIFFERENCE]) for row in rows if row.get(DIFFERENCE, 0) > 0]
    if shown:
        difference = reward.twinx()
        difference.semilogy(*zip(*shown, strict=True), color="#b5651d", linewidth=1, alpha=0.8)
        difference.set_ylabel("|logprob difference|, trainer and engine", color="#b5651d")
    figure.savefig(picture, dpi=120)
