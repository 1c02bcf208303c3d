"""What a person sees of a run: a live display, plain lines, or nothing; and a closing table.

The three displays have one face, so a pipeline does not know which it talks to. Metrics are shown by their names in
the metrics file; nothing is computed here that is not in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

REWARD = "rollout/raw_reward"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
THROUGHPUT = "perf/tokens_per_gpu_per_sec"

_BARS = "▁▂▃▄▅▆▇█"

#: (label, metric, format) of the values that the displays show.
SHOWN = (
    ("reward", REWARD, ".3f"),
    ("evaluation", "eval/reward", ".3f"),
    ("tokens/s/device", THROUGHPUT, ",.0f"),
    ("logprob difference", DIFFERENCE, ".1e"),
    ("lag", "rollout/lag/mean", ".2f"),
    ("response tokens", "rollout/response_len/mean", ".1f"),
    ("gradient norm", "train/grad_norm", ".3f"),
    ("step seconds", "perf/step_time", ".1f"),
)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw values as a line of blocks, lowest to highest; the last ``width`` of them.

    Args:
        values: Finite numbers.
        width: Characters at most.

    Returns:
        One character a value; values that are all equal give a line of the lowest block.
    """
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span > 0 else 0] for value in shown)


def closing_table(history: Sequence[Mapping[str, float]], *, edge: int = 3) -> Table:
    """Compare the beginning of a run with its end.

    Args:
        history: Metrics of each step, as read from the metrics file.
        edge: Steps averaged at either end (fewer when the run is shorter).

    Returns:
        A table with one line a metric: mean of the first and of the last steps, least and greatest.
    """
    edge = max(1, min(edge, len(history)))
    table = Table(title=f"{len(history)} steps", title_justify="left")
    for heading in ("", f"first {edge}", f"last {edge}", "least", "greatest"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, name, spec in SHOWN:
        values = [row[name] for row in history if name in row]
        if values:
            first, last = values[:edge], values[-edge:]
            cells = (sum(first) / len(first), sum(last) / len(last), min(values), max(values))
            table.add_row(label, *(format(cell, spec) for cell in cells))
    return table


class Display:
    """Shows nothing: the mode ``off``, and the face of the others.

    Use as a context manager around the run's loop.

    Args:
        steps: Steps of the run.
        console: Where to write; by default standard error, so that standard output stays free for results.
    """

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Remember the run's length."""
        self.steps = steps
        self.console = console or Console(stderr=True)
        self.rewards: list[float] = []

    def phase(self, name: str) -> None:
        """Say what the run does now: ``rollout``, ``train``, ``update_weights``, ..."""

    def note(self, text: str) -> None:
        """Show a line that stays: a checkpoint was written, an engine was restarted."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            step: Its number, from 1.
            metrics: Its metrics.
        """
        if REWARD in metrics:
            self.rewards.append(metrics[REWARD])

    def finish(self, history: Sequence[Mapping[str, float]]) -> None:
        """Show the closing table; a live display ends here."""

    def __enter__(self) -> Display:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End."""


class PlainDisplay(Display):
    """One line a step, for logs and pipes."""

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(Text(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line with the step's values."""
        super().step(step, metrics)
        values = [f"{label} {metrics[name]:{spec}}" for label, name, spec in SHOWN if name in metrics]
        self.console.print(Text(f"step {step}/{self.steps}  " + "  ".join(values)), soft_wrap=True)

    def finish(self, history: Sequence[Mapping[str, float]]) -> None:
        """Print the closing table."""
        if history:
            self.console.print(closing_table(history))


class LiveDisplay(PlainDisplay):
    """A progress bar, the latest values and the curve of the reward, redrawn in place."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Lay the display out."""
        super().__init__(steps, console)
        self._phase, self._since = "starting", time.monotonic()
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self.console, speed_estimate_period=600,
        )  # fmt: skip
        self._task = self._progress.add_task("steps", total=steps)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        """Take the end of the terminal over."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the last state on the terminal and give it back."""
        self._live.stop()

    def phase(self, name: str) -> None:
        """Show the phase and since when it runs."""
        self._phase, self._since = name, time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and show the step's values."""
        Display.step(self, step, metrics)
        self._latest = dict(metrics)
        self._progress.update(self._task, completed=step)

    def finish(self, history: Sequence[Mapping[str, float]]) -> None:
        """Stop redrawing, then print the closing table below the last state."""
        self._live.stop()
        super().finish(history)

    def _render(self) -> RenderableType:
        values = Table.grid(padding=(0, 2))
        for label, name, spec in SHOWN:
            if name in self._latest:
                values.add_row(label, format(self._latest[name], spec))
        if self.rewards:
            values.add_row("", Text(sparkline(self.rewards), style="green"))
        seconds = time.monotonic() - self._since
        return Group(self._progress, values, Text(f"{self._phase} for {seconds:.0f} s", style="dim"))


def make_display(mode: Literal["live", "plain", "off"], steps: int, console: Console | None = None) -> Display:
    """Return the display of a mode.

    Args:
        mode: ``tracking.console`` of the configuration.
        steps: Steps of the run.
        console: Where to write; by default standard error.

    Returns:
        The display. ``live`` becomes ``plain``, and says so, where the output is no terminal.
    """
    console = console or Console(file=sys.stderr)
    if mode == "off":
        return Display(steps, console)
    if mode == "plain":
        return PlainDisplay(steps, console)
    if not console.is_terminal:
        display = PlainDisplay(steps, console)
        display.note("the output is no terminal: one line a step instead of the live display")
        return display
    return LiveDisplay(steps, console)
