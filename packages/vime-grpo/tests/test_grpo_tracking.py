"""The metrics file: whole lines, increasing steps, cut exactly where a run resumes, and a full disk."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_grpo.errors import MetricsError
from vime_grpo.tracking import MetricsWriter, read_metrics


def filled(path: Path, steps: int = 4) -> Path:
    with MetricsWriter(path) as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"x": step / 3})
    return path


def test_lines_are_objects_and_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"rollout/raw_reward": 0.25, "count": 3})
    assert path.read_text() == '{"step": 1, "rollout/raw_reward": 0.25, "count": 3}\n'
    writer.close()


@settings(max_examples=25)
@given(st.integers(0, 4), st.integers(0, 3), st.sampled_from(["", '{"step": 5, "x"', "\x00\x00"]))
def test_resume_keeps_the_steps_before_and_nothing_else(resume_step: int, more: int, torn: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = filled(Path(folder) / "metrics.jsonl")
        with path.open("a") as file:
            file.write(torn)
        with MetricsWriter(path, resume_step=resume_step) as writer:
            for step in range(resume_step + 1, resume_step + 1 + more):
                writer.write(step, {"x": -1.0})
        rows = read_metrics(path)
        assert [row["step"] for row in rows] == list(range(1, resume_step + more + 1))
        assert [row["x"] for row in rows] == [step / 3 for step in range(1, resume_step + 1)] + [-1.0] * more
        assert list(Path(folder).iterdir()) == [path]


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = filled(tmp_path / "metrics.jsonl")
    MetricsWriter(path).close()
    assert read_metrics(path) == []


def test_resume_at_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "metrics.jsonl", steps=2)
    with pytest.raises(MetricsError, match=r"does not reach the step.*seen: last step 2; expected: step 5"):
        MetricsWriter(path, resume_step=5)
    assert len(read_metrics(path)) == 2
    with pytest.raises(MetricsError, match="seen: no steps"):
        MetricsWriter(tmp_path / "absent.jsonl", resume_step=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
def test_values_that_are_no_finite_numbers_are_named(tmp_path: Path, value: object) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        with pytest.raises(MetricsError, match=r"no finite number \(step 1, train/loss\)"):
            writer.write(1, {"ok": 1.0, "train/loss": value})  # type: ignore[dict-item]
        writer.write(1, {"ok": 1.0})
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1


def test_steps_must_increase(tmp_path: Path) -> None:
    with MetricsWriter(filled(tmp_path / "m.jsonl"), resume_step=4) as writer:
        with pytest.raises(MetricsError, match="4 after 4"):
            writer.write(4, {})
        writer.write(5, {})


@pytest.mark.parametrize("line", ["{", "[]", '{"step": "1"}', '{"x": 1}', ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(MetricsError, match=r"m.jsonl, line 2"):
        read_metrics(path)


def test_unreadable_and_unwritable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match=r"cannot be read \(.*absent"):
        read_metrics(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match="cannot be written"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.close()
    writer._file._file = Path("/dev/full").open("a")  # noqa: SIM115 - the writer owns it
    with pytest.raises(MetricsError, match=rf"(?s){os.strerror(errno.ENOSPC)}.*free space on the disk"):
        writer.write(1, {"x": 1.0})
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        writer.close()


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    path = filled(tmp_path / "m.jsonl", steps=3)
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [1 / 3, 2 / 3, 1.0]
