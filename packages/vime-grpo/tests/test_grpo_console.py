"""What is shown is in the metrics, and each mode shows what it promises."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from vime_grpo.console import Display, LiveDisplay, PlainDisplay, closing_table, make_display, sparkline

HISTORY = [
    {
        "step": step,
        "rollout/raw_reward": step / 10,
        "train/train_rollout_logprob_abs_diff": 1e-6,
        "perf/tokens_per_gpu_per_sec": 1234.0,
    }
    for step in range(1, 7)
]


def terminal(is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=is_terminal, width=120, color_system=None), output


def drive(display: Display) -> None:
    with display as shown:
        for row in HISTORY:
            shown.phase("rollout")
            shown.step(int(row["step"]), row)
        shown.note("saved step 6")
        shown.finish(HISTORY)


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(1, 50))
def test_sparkline_has_one_block_a_value(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_closing_table_compares_beginning_and_end() -> None:
    console, output = terminal()
    console.print(closing_table(HISTORY))
    lines = output.getvalue().splitlines()
    reward = next(line for line in lines if "reward" in line)
    assert [cell.strip() for cell in reward.split("│")[1:-1]] == ["reward", "0.200", "0.500", "0.100", "0.600"]
    assert "1.0e-06" in output.getvalue()
    assert "gradient norm" not in output.getvalue()  # was not measured


def test_closing_table_of_a_short_run_uses_what_there_is() -> None:
    console, output = terminal()
    console.print(closing_table(HISTORY[:1]))
    assert "first 1" in output.getvalue()


def test_plain_prints_a_line_a_step() -> None:
    console, output = terminal(is_terminal=False)
    drive(PlainDisplay(6, console))
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("step 1/6  reward 0.100  tokens/s/device 1,234  logprob difference 1.0e-06")
    assert "saved step 6" in lines
    assert any("first 3" in line for line in lines)


def test_live_shows_progress_values_and_phase() -> None:
    console, output = terminal()
    drive(LiveDisplay(6, console))
    text = output.getvalue()
    for part in ("6/6", "0.600", "▁▂▄▅▇█"[0], "rollout for", "saved step 6", "first 3"):
        assert part in text


def test_off_shows_nothing_and_an_empty_history_no_table() -> None:
    console, output = terminal()
    drive(make_display("off", 6, console))
    PlainDisplay(1, console).finish([])
    assert output.getvalue() == ""


def test_live_becomes_plain_where_there_is_no_terminal_and_says_so() -> None:
    console, output = terminal(is_terminal=False)
    assert type(make_display("live", 3, console)) is PlainDisplay
    assert "no terminal" in output.getvalue()
    assert type(make_display("live", 3, terminal()[0])) is LiveDisplay
    assert type(make_display("plain", 3)) is PlainDisplay
