"""The samples file: which samples are chosen, what is kept of them, and what a resume cuts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.errors import MetricsError
from vime_grpo.samples import MAX_CHARACTERS, SampleRecord, SamplesWriter, extremes, read_samples, shorten


def record(reward: float = 1.0, response: str = "4", **changes: object) -> SampleRecord:
    values = {"rank": "best", "prompt": "2 + 2?", "group": "g", "index": 0} | changes
    return SampleRecord(reward=reward, response=response, **values)  # type: ignore[arg-type]


def test_the_best_and_the_worst_are_of_different_prompts_where_possible() -> None:
    rewards = [1.0, 1.0, 0.0, 0.5, 1.0, 0.0]
    groups = ["a", "a", "a", "b", "b", "b"]
    assert extremes(rewards, groups, 2) == ([0, 4], [2, 5])
    assert extremes(rewards, groups, 1) == ([0], [2])
    assert extremes(rewards, groups, 0) == ([], [])
    assert extremes(rewards, ["a"] * 6, 2) == ([0, 1], [2, 5])
    assert extremes([0.5, 0.25], ["a", "b"], 2) == ([0, 1], [])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), max_size=12), st.integers(0, 4))
def test_no_sample_is_both_and_the_extremes_are_in(samples: list[tuple[float, int]], keep: int) -> None:
    rewards = [reward for reward, _ in samples]
    best, worst = extremes(rewards, [group for _, group in samples], keep)
    assert not set(best) & set(worst)
    assert len(best) == min(keep, len(samples))
    assert len(worst) == min(keep, len(samples) - len(best))
    if best:
        assert rewards[best[0]] == max(rewards)
    if worst:
        assert rewards[worst[0]] == min(rewards[i] for i in range(len(rewards)) if i not in best)


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "samples.jsonl"
    odd = record(0.0, 'line\nline\u2028 "quoted" \ud800', rank="worst", reason="no answer", label="4", tokens=7)
    with SamplesWriter(path) as writer:
        writer.write(1, [record(), odd])
        writer.write(2, [])
        writer.write(3, [record(0.5)])
    assert read_samples(path) == [(1, record()), (1, odd), (3, record(0.5))]


def test_resume_cuts_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SamplesWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(step, [record(step / 4), record(0.0)])
    with path.open("a") as file:
        file.write('{"step": 4, "re')
    with SamplesWriter(path, resume_step=2) as writer:
        writer.write(3, [record(0.9)])
    assert [(step, item.reward) for step, item in read_samples(path)] == [(1, 0.25), (1, 0), (2, 0.5), (2, 0), (3, 0.9)]
    with SamplesWriter(path):
        assert read_samples(path) == []
    with SamplesWriter(tmp_path / "none-yet.jsonl", resume_step=9) as writer:
        writer.write(10, [record()])


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    text = "a" * MAX_CHARACTERS + "b" * MAX_CHARACTERS
    short = shorten(text)
    assert len(short) < MAX_CHARACTERS + 100
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert f"[... {MAX_CHARACTERS} characters left out ...]" in short
    assert shorten("as it is") == "as it is"
    with SamplesWriter(tmp_path / "s.jsonl") as writer:
        writer.write(1, [record(1.0, text)])
    assert read_samples(tmp_path / "s.jsonl")[0][1].response == short


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SamplesWriter(path) as writer:
        writer.write(2, [record()])
        with pytest.raises(MetricsError, match=r"steps must increase.*seen: 2 after 2"):
            writer.write(2, [record()])
        with pytest.raises(MetricsError, match=r"no finite number \(step 3, sample 0 of group g\); seen: nan"):
            writer.write(3, [record(), record(math.nan)])
    assert len(read_samples(path)) == 1
    with pytest.raises(MetricsError, match="samples file cannot be written"):
        writer.write(3, [record()])
    with path.open("a") as file:
        file.write('{"step": 3, "reward": 1, "later_version": 1}\n')
    with pytest.raises(MetricsError, match=r"not a sample \(.*line 2\).*missing.*'prompt'"):
        read_samples(path)
