"""The timeline of a report: a bar for every phase, a lane for everybody who works, one clock across.

Lanes are drawn from the top in the order of a step. Spans of one lane that overlap, as batches of an asynchronous run
do, are drawn below each other. A long run shows its first and its last steps: bars of all of them would be hairlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime_grpo.report.charts import COLORS, SETTINGS, svg_element
from vime_grpo.timeline import Span, run_clock

LANES = ("batch", "rollout", "trainer", "sync", "offload", "save", "eval")
#: Steps of one drawing.
STEPS = 8
#: The part of the drawing's width that a bar must have to carry its step's number.
LABELLED = 0.015
#: Generation that never stops is cut where a batch is taken, in the middle of another one: the lane ``batch`` has both.
UNNUMBERED = {"wait_for_rollout", "generate"}
_PHASES = ("rollout", "train", "update_weights", "stage", "save", "logprobs", "evaluate", "batch")
_COLORS = {
    **dict(zip(_PHASES, COLORS, strict=True)),
    "generate": COLORS[0],
    "wait_for_rollout": "#DDDDDD",
    "offload": "#8C6BB1",
    "onload": "#BCA7D6",
    "sleep": "#8499AD",
    "wake": "#B9C7D4",
}


def color_of(phase: str) -> str:
    """Return the colour of a phase; the same for a name in every report."""
    return _COLORS.get(phase, COLORS[sum(phase.encode()) % len(COLORS)])


def windows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Choose what is drawn.

    Args:
        spans: Of the whole run, on the run's clock.

    Returns:
        Title and spans of each drawing: all steps of a short run, the first and the last of a long one.
    """
    steps = sorted({span.step for span in spans})
    if len(steps) <= 2 * STEPS:
        parts = {"Timeline": steps}
    else:
        parts = {f"Timeline of the first {STEPS} steps": steps[:STEPS], f"Timeline of the last {STEPS}": steps[-STEPS:]}
    return [(title, [span for span in spans if span.step in set(chosen)]) for title, chosen in parts.items() if chosen]


def rows_of(spans: Sequence[Span]) -> list[int]:
    """Return the row of each span: the first one that is free when it begins.

    Args:
        spans: Of one lane, ordered by their begin.
    """
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    return rows


def draw_timeline(spans: Sequence[Span]) -> list[tuple[str, str]]:
    """Draw the timeline of a run.

    Args:
        spans: As `vime_grpo.timeline.read_timeline` returns them.

    Returns:
        (title, SVG element) of each drawing; none for a run that has no timeline.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = []
    with mpl.rc_context(SETTINGS):
        for number, (title, chosen) in enumerate(windows(run_clock(spans))):
            known = {span.lane for span in chosen}
            lanes = [lane for lane in LANES if lane in known] + sorted(known - set(LANES))
            figure = Figure(figsize=(13.2, 0.7 + 0.36 * len(lanes)), layout="constrained")
            axes = figure.add_subplot()
            _draw(axes, chosen, lanes)
            drawn.append((title, svg_element(figure, f"t{number}", title)))
    return drawn


def _draw(axes: Any, spans: Sequence[Span], lanes: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    width = (end - begin) or 1.0
    for place, lane in enumerate(lanes):
        own = [span for span in spans if span.lane == lane]
        rows = rows_of(own)
        height = 0.8 / (max(rows) + 1)
        for span, row in zip(own, rows, strict=True):
            low, took = place - 0.4 + row * height, span.end - span.begin
            # A gap of the page's colour keeps bars apart that follow each other at once.
            apart = took > 0.002 * width and span.phase != "generate"
            edge = {"edgecolor": "white", "linewidth": 0.4 if apart else 0.0}
            axes.broken_barh([(span.begin, took)], (low, height), facecolors=color_of(span.phase), **edge)
            if took >= LABELLED * width and span.phase not in UNNUMBERED:
                middle = (span.begin + took / 2, low + height / 2)
                axes.annotate(f"{span.step}", middle, ha="center", va="center", fontsize=6.5, color="white")
    for later in sorted({span.session for span in spans})[1:]:
        resumed = min(span.begin for span in spans if span.session == later)
        axes.axvline(resumed, color="black", linewidth=0.9, linestyle="--")
        axes.annotate("resumed", (resumed, -0.6), fontsize=7, ha="left", annotation_clip=False)
    axes.set_xlim(begin, begin + width)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the first step began; a number is the step")
    axes.grid(axis="x", alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    phases = [Patch(color=color_of(phase), label=phase) for phase in dict.fromkeys(span.phase for span in spans)]
    axes.figure.legend(handles=phases, fontsize=7, frameon=False, loc="outside upper left", ncols=len(phases))
