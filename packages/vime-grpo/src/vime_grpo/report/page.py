"""The page of a report: everything is escaped but the charts, whose text matplotlib escapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from vime_grpo.console import SHOWN
from vime_grpo.errors import LaunchError, ReportError
from vime_grpo.report.recorded import RecordedRun, read_run

#: Samples shown of the highest, and of the lowest reward; and steps whose samples are shown.
SAMPLES, STEPS = 5, 6


def write_report(folder: str | Path, out: str | Path | None = None, *, compare: Sequence[str | Path] = ()) -> Path:
    """Write the report of a run, finished or not.

    Args:
        folder: The run folder.
        out: The page; by default ``report.html`` in the folder.
        compare: Folders of runs whose rewards are drawn beside.

    Returns:
        The page.

    Raises:
        ReportError: A folder is no run, or the page cannot be written.
        MetricsError: A file of the run cannot be read.
        LaunchError: The extra ``report`` is not installed.
    """
    run = read_run(folder)
    page = Path(out) if out is not None else Path(folder) / "report.html"
    # A lone surrogate, which a broken byte of a model's answer becomes, has no UTF-8.
    content = render(run, [read_run(other) for other in compare]).encode("utf-8", errors="replace")
    beside = page.with_name(page.name + ".new")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        beside.replace(page)
    except OSError as error:
        raise ReportError("the report cannot be written", where=str(page), seen=str(error)) from error
    return page.absolute()


def render(run: RecordedRun, others: Sequence[RecordedRun] = ()) -> str:
    """Return the page of a run.

    Args:
        run: What was recorded.
        others: Runs to compare with.

    Raises:
        LaunchError: The extra ``report`` is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from vime_grpo.report.charts import MAX_POINTS, draw_charts, time_unit
        from vime_grpo.report.gantt import draw_timeline

        timeline = draw_timeline(run.timeline)
        charts = draw_charts(run.metrics, [(other.name, other.metrics) for other in others])
    except ImportError as error:
        raise LaunchError(
            "reports need packages that are not installed",
            where="vime-grpo report",
            seen=str(error),
            fix="pip install 'vime-grpo[report]'",
        ) from error
    environment = Environment(
        loader=PackageLoader("vime_grpo.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    edge = max(1, min(3, len(run.metrics) // 2))
    best, worst = run.extremes(SAMPLES)
    unit, seconds = time_unit(run.metrics)
    return environment.get_template("page.html.jinja").render(
        run=run,
        others=others,
        charts=charts,
        timeline=timeline,
        summary=summary(run, edge),
        edge=edge,
        time=sum(row.get("perf/step_time", 0.0) for row in run.metrics) / seconds,
        unit=unit,
        width=math.ceil(len(run.metrics) / MAX_POINTS),
        best=best,
        worst=worst,
        over_time=run.over_time(STEPS),
    )


def summary(run: RecordedRun, edge: int) -> list[tuple[str, ...]]:
    """Compare the first and last ``edge`` steps of a run.

    Returns:
        One row a metric that the run has: its label, mean of the first and of the last, least and greatest.
    """
    rows = []
    for label, name, spec in SHOWN:
        values = [row[name] for row in run.metrics if name in row]
        if values:
            first, last = values[:edge], values[-edge:]
            cells = (sum(first) / len(first), sum(last) / len(last), min(values), max(values))
            rows.append((label, *(format(cell, spec) for cell in cells)))
    return rows
