"""The timeline of a run: one clock across processes, steps and resumes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.errors import MetricsError
from vime_grpo.report.gantt import STEPS, rows_of, windows
from vime_grpo.timeline import Span, TimelineWriter, read_timeline, run_clock


def test_spans_are_unix_time_and_wait_for_the_step(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    before, now = time.time(), time.monotonic()
    with TimelineWriter(path) as writer:
        writer.add(2, "trainer", "train", now + 3, now + 5)
        writer.add(1, "save", "save", now + 1, now + 1.5)
        assert path.read_text() == "", "nothing is written in the middle of a step"
        writer.write()
        first, second = read_timeline(path)
        writer.add(2, "save", "save", now + 6, now + 7)
    assert (first.step, first.phase, second.phase) == (1, "save", "train")
    assert second.end - second.begin == pytest.approx(2, abs=1e-3)
    assert first.begin - before == pytest.approx(1, abs=60), "the wall's time, were it adjusted meanwhile"
    assert [span.phase for span in read_timeline(path)] == ["save", "train", "save"], "the last save is kept too"


def test_a_resume_cuts_what_was_lost_and_is_a_session_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    for resume in (None, 2, 2):
        with TimelineWriter(path, resume_step=resume) as writer:
            for step in range(1 if resume is None else resume + 1, 5):
                writer.add(step, "trainer", "train", step, step + 0.5)
                writer.write()
    assert [(span.step, span.session) for span in read_timeline(path)] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_run_of_before_timelines_gets_one_when_it_is_resumed(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path / "phases.jsonl", resume_step=7) as writer:
        writer.add(8, "trainer", "train", 1.0, 2.0)
    (span,) = read_timeline(tmp_path / "phases.jsonl")
    assert (span.step, span.session) == (8, 0)


SPANS = st.builds(
    lambda step, lane, begin, took, session: Span(step, lane, "work", begin, begin + took, session),
    st.integers(0, 40),
    st.sampled_from(["rollout", "trainer", "other"]),
    st.floats(1e9, 1e9 + 1e4),
    st.floats(0, 100),
    st.integers(0, 3),
)


@given(st.lists(SPANS, max_size=30))
def test_the_runs_clock_begins_at_zero_and_sessions_follow_each_other(spans: list[Span]) -> None:
    moved = run_clock(spans)
    assert sorted((s.step, s.lane, s.session) for s in moved) == sorted((s.step, s.lane, s.session) for s in spans)
    assert min((s.begin for s in moved), default=0.0) == 0.0
    for session in {span.session for span in spans}:
        own = [span for span in moved if span.session == session]
        earlier = [span.end for span in moved if span.session < session]
        assert min(span.begin for span in own) == max(earlier, default=0.0), "neither a gap nor an overlap"
        before = sorted(span.end - span.begin for span in spans if span.session == session)
        assert sorted(span.end - span.begin for span in own) == pytest.approx(before, abs=1e-5)


@given(st.lists(SPANS, min_size=1, max_size=30))
def test_bars_of_a_lane_never_cover_each_other(spans: list[Span]) -> None:
    ordered = sorted((replace(span, lane="one") for span in spans), key=lambda span: (span.begin, span.end))
    rows = rows_of(ordered)
    for row in set(rows):
        own = [span for span, its in zip(ordered, rows, strict=True) if its == row]
        assert all(a.end <= b.begin for a, b in pairwise(own))
    assert set(rows) == set(range(max(rows) + 1))


def test_a_long_run_shows_its_first_and_last_steps() -> None:
    spans = [Span(step, "trainer", "train", step, step + 0.5) for step in range(1, 101)]
    (all_of_it, drawn), *more = windows(spans[: 2 * STEPS])
    assert (all_of_it, len(drawn), more) == ("Timeline", 2 * STEPS, [])
    (_, first), (_, last) = windows(spans)
    assert [span.step for span in first] == list(range(1, STEPS + 1))
    assert [span.step for span in last] == list(range(101 - STEPS, 101))
    assert windows([]) == []


def test_a_line_that_is_no_span_is_named(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    good = {"step": 1, "lane": "a", "phase": "b", "begin": 1.0, "end": 2.0, "session": 0, "of a later version": 1}
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "end": 0.5}) + "\n")
    with pytest.raises(MetricsError, match=r"line 2.*from 1.0 to 0.5"):
        read_timeline(path)
    for wrong in ({"step": 1}, {**good, "begin": "soon"}):
        path.write_text(json.dumps(good) + "\n" + json.dumps(wrong) + "\n")
        with pytest.raises(MetricsError, match=r"not a span.*line 2"):
            read_timeline(path)
