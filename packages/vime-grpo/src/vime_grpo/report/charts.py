"""The charts of a report, drawn as SVG to stand inside a page.

What is drawn is a table: a chart names its metrics, by name or pattern, and is left out when the run has none of them.
So a new metric of a known kind shows up by itself, and no number is computed here that is not in the metrics file, but
means over steps where a run has more of them than a chart has room for.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, float]]

#: Points of a line at most; beyond it a point is the mean of several steps.
MAX_POINTS = 600
#: From here on a line is drawn faintly, with its running mean on top.
SMOOTH_FROM = 40
#: Colours that people with any colour vision can tell apart (M. Okabe and K. Ito, 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#555555")
#: Horizontal axis of charts over time; which unit, the length of the run decides.
TIME = "time"
UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
#: Times that lie within others, or are their sum.
_NOT_PHASES = {"perf/step_time", "perf/actor_train_time", "perf/log_probs_time", "perf/generation_idle_time"}
#: Text stays text: it can be searched and read aloud, and needs no font in the file. `$` in a name is no formula.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "vime", "text.parse_math": False, "font.size": 8}


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: Its heading.
        unit: What the vertical axis counts.
        metrics: Patterns of whole names of metrics, in the order in which they are drawn.
        draw: Draws the metrics that the run has on a matplotlib ``Axes``.
        across: What the horizontal axis counts: steps, or the `TIME` in them.
        compared: Whether other runs are drawn beside it.
        log: Logarithmic vertical axis.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    draw: Callable[[Any, Rows, Sequence[str]], None]
    across: str = "step"
    compared: bool = False
    log: bool = False

    def names(self, rows: Rows) -> list[str]:
        """Return the metrics of a run that belong into this chart."""
        known = dict.fromkeys(name for row in rows for name in row)
        return [name for pattern in self.metrics for name in known if re.fullmatch(pattern, name)]


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return (steps, values) of one metric where it is a finite number, at most about `MAX_POINTS` of them."""
    found = [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]
    width = math.ceil(len(found) / MAX_POINTS) or 1
    bins = [found[i : i + width] for i in range(0, len(found), width)]
    return [sum(s for s, _ in b) / len(b) for b in bins], [sum(v for _, v in b) / len(b) for b in bins]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each value and those up to ``width // 2`` places before and behind it."""
    reach = width // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _lines(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        steps, values = series(rows, name)
        scale = 1 / 1024 if name.endswith("_mib") else 1.0
        values = [value * scale for value in values]
        color = COLORS[index % len(COLORS)]
        if any(f"{name}_sem" in row for row in rows):
            _, errors = series(rows, f"{name}_sem")
            low = [v - e for v, e in zip(values, errors, strict=True)]
            high = [v + e for v, e in zip(values, errors, strict=True)]
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        smooth = len(values) >= SMOOTH_FROM
        marker = "o" if len(values) < SMOOTH_FROM else None
        axes.plot(
            steps,
            values,
            color=color,
            linewidth=0.8 if smooth else 1.5,
            alpha=0.35 if smooth else 1.0,
            marker=marker,
            markersize=2.5,
            label=None if smooth else name,
        )
        if smooth:
            axes.plot(steps, running_mean(values, len(values) // 20), color=color, linewidth=1.6, label=name)


def time_unit(rows: Rows) -> tuple[str, float]:
    """Return the unit to tell a run's time in, and its seconds: the largest that the run has two of."""
    seconds = sum(row.get("perf/step_time", 0.0) for row in rows)
    return next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])


def _over_time(rows: Rows, unit_s: float) -> Rows:
    """Return rows whose step is the time at its end, in units since the run began; pauses do not count."""
    ends = itertools.accumulate(row.get("perf/step_time", 0.0) / unit_s for row in rows)
    return [{**row, "step": end} for row, end in zip(rows, ends, strict=True)]


def _beside(axes: Any, chart: Chart, others: Sequence[tuple[str, Rows]], unit_s: float) -> None:
    """Draw the same metrics of other runs, dashed, each run in its own colour."""
    for index, (run, rows) in enumerate(others):
        color = COLORS[(len(chart.metrics) + index) % len(COLORS)]
        for name in chart.names(rows):
            steps, values = series(_over_time(rows, unit_s) if chart.across == TIME else rows, name)
            if len(values) >= SMOOTH_FROM:
                values = running_mean(values, len(values) // 20)
            axes.plot(steps, values, color=color, linewidth=1.4, linestyle="--", label=f"{run}: {name}")


def _stacked(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    names = [name for name in names if name not in _NOT_PHASES]
    # A phase that a step did not have took no time in it.
    complete = [{"step": row["step"], **{name: row.get(name, 0.0) for name in names}} for row in rows]
    floor: list[float] = []
    for index, name in enumerate(names):
        steps, values = series(complete, name)
        floor = floor or [0.0] * len(values)
        top = [low + value for low, value in zip(floor, values, strict=True)]
        color = COLORS[index % len(COLORS)]
        axes.stairs(top, _edges(steps), baseline=floor, fill=True, color=color, alpha=0.85, label=name)
        floor = top
    steps, whole = series(rows, "perf/step_time")
    if steps:
        axes.stairs(whole, _edges(steps), baseline=None, color="black", linewidth=0.7, label="perf/step_time")


def _edges(steps: Sequence[float]) -> list[float]:
    """Return where each step begins and ends on the axis: halfway to its neighbours."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    first, last = (middles[0], middles[-1]) if middles else (steps[0] + 0.5, steps[0] - 0.5)
    return [2 * steps[0] - first, *middles, 2 * steps[-1] - last]


def _histogram(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    totals = {int(name.rpartition("_")[2]): sum(row.get(name, 0.0) for row in rows) for name in names}
    lags = sorted(totals)
    bars = axes.bar(lags, [totals[lag] for lag in lags], color=COLORS[0], width=0.7)
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)


CHARTS = (
    Chart("Reward", "mean reward", ("rollout/raw_reward",), _lines, compared=True),
    Chart("Reward over time", "mean reward", ("rollout/raw_reward",), _lines, across=TIME, compared=True),
    Chart("Evaluation", "share or mean reward", ("eval/reward", r"eval/pass@\d+"), _lines, compared=True),
    Chart(
        "Difference of log-probabilities between trainer and engine",
        "nats",
        ("train/train_rollout_logprob_abs_diff", "train/on_policy_logprob_abs_diff", "rollout/logprob_abs_diff_max"),
        _lines,
        log=True,
    ),
    Chart("KL", "nats", ("train/kl_loss", "train/ppo_kl"), _lines),
    Chart("Entropy", "nats", ("train/entropy_loss",), _lines),
    Chart("Gradient norm", "norm before clipping", ("train/grad_norm",), _lines),
    Chart("Clipped and dropped tokens", "share", (r"train/(pg|tis)_(clip|mask)frac",), _lines),
    Chart("Response length", "tokens", (r"rollout/response_len/(mean|median|max)",), _lines),
    Chart(
        "Samples that teach little",
        "share",
        ("rollout/zero_std/ratio", "rollout/truncated_ratio", "rollout/repetition_frac"),
        _lines,
    ),
    Chart(
        "Lag of samples behind the weights that trained on them", "samples", (r"rollout/lag/samples_\d+",), _histogram
    ),
    Chart("Queue between engines and trainer", "groups", (r"queue/(ready|in_flight)",), _lines),
    Chart(
        "Throughput of generation",
        "tokens per second and device",
        (r"perf/(effective_)?tokens_per_gpu_per_sec",),
        _lines,
    ),
    Chart("Throughput of training", "tokens per second", ("perf/actor_train_tok_per_s",), _lines),
    Chart("Phases of a step", "seconds", (r"perf/\w+_time",), _stacked),
    Chart("Memory", "GiB", (r"memory/.+", r"perf/\w+_gib", r"proc/.+_rss_mib"), _lines),
)


def draw_charts(rows: Rows, others: Sequence[tuple[str, Rows]] = ()) -> list[tuple[str, str]]:
    """Draw every chart that a run has metrics for.

    Args:
        rows: Metrics of each step.
        others: Names and metrics of runs to compare with.

    Returns:
        (title, SVG element) of each; identities in one do not occur in another.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn: list[tuple[str, str]] = []
    unit, unit_s = time_unit(rows)
    with mpl.rc_context(SETTINGS):
        for chart in CHARTS:
            names = [name for name in chart.names(rows) if any(math.isfinite(row.get(name, math.nan)) for row in rows)]
            if not names or (chart.draw is _stacked and set(names) <= _NOT_PHASES):
                continue
            figure = Figure(figsize=(6.4, 2.9), layout="constrained")
            axes = figure.add_subplot()
            chart.draw(axes, _over_time(rows, unit_s) if chart.across == TIME else rows, names)
            if chart.compared:
                _beside(axes, chart, others, unit_s)
            if chart.log and any(row.get(name, 0.0) > 0 for row in rows for name in names):
                _use_log_scale(axes)
            _dress(axes, chart, f"{unit} in steps" if chart.across == TIME else chart.across)
            drawn.append((chart.title, svg_element(figure, f"c{len(drawn)}", chart.title)))
    return drawn


def _use_log_scale(axes: Any) -> None:
    """Scale the vertical axis by logarithm; its usual labels are formulas, and no text of the page is one."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    # Where no two powers of ten are in sight, what lies between them has to carry the numbers.
    few = math.floor(math.log10(high)) - math.ceil(math.log10(low)) < 1
    axes.yaxis.set_minor_formatter(lambda value, _place: f"{value:.2g}" if few else "")


def _dress(axes: Any, chart: Chart, across: str) -> None:
    axes.set_ylabel(chart.unit)
    axes.set_xlabel(across)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.across != TIME:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[1]:
        axes.figure.legend(fontsize=7, frameon=False, loc="outside upper left", ncols=2)


def svg_element(figure: Any, prefix: str, title: str) -> str:
    """Return a figure as an element for HTML: without the XML head, its identities made unique by a prefix.

    Args:
        figure: A matplotlib ``Figure``.
        prefix: Goes before every identity.
        title: What the drawing shows, for those who hear the page.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
