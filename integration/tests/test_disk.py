"""What a run needs on its disk is what it can write, and no more; stated exactly by playing its saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integration_support import EXAMPLES
from vime_grpo import RunConfig, load_config
from vime_integration import disk
from vime_integration.bundle import BundleStore
from vime_integration.disk import disk_need, saves_left
from vime_integration.errors import BundleError
from vime_integration.preflight import check_before_start

MODEL_PARTS = 3  # of a bundle's size: float32 weights beside weights and two moments


def configured(run: Path, *overrides: str) -> RunConfig:
    return load_config(EXAMPLES / "demo_cpu.toml", [f"pipeline.run_dir={run}", *overrides])


def checkpoints(run: Path, *overrides: str, resume: Path | None = None) -> int:
    return disk_need(configured(run, *overrides), resume).checkpoints


def test_a_run_that_saves_once_needs_room_for_one(tmp_path: Path) -> None:
    need = disk_need(configured(tmp_path / "run", "checkpoint.every=0", "checkpoint.keep=3"))
    assert need.checkpoints == 1
    assert need.total == need.checkpoint_bytes + need.checkpoint_bytes // MODEL_PARTS, "and for the trained model"
    assert need.folder == tmp_path
    assert "a checkpoint of" in need.text()


def test_a_long_run_needs_room_for_those_kept_and_the_one_being_written(tmp_path: Path) -> None:
    long = ("pipeline.steps=1000", "checkpoint.every=10", "checkpoint.keep=2")
    assert checkpoints(tmp_path, *long) == 3
    assert checkpoints(tmp_path, *long, "pipeline.steps=15") == 2
    assert "up to 3 checkpoints" in disk_need(configured(tmp_path, *long)).text()


def test_a_run_that_never_saves_needs_room_for_the_trained_model_alone(tmp_path: Path) -> None:
    need = disk_need(configured(tmp_path, "checkpoint.every=0", "checkpoint.last=false"))
    assert need.checkpoints == 0
    assert need.total == need.checkpoint_bytes // MODEL_PARTS
    assert "checkpoint" not in need.text()


def test_what_stands_already_makes_place_for_what_comes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("pipeline.steps=100", "checkpoint.every=10", "checkpoint.keep=2")
    for count, more in ((1, 2), (2, 1), (3, 1)):  # three: `keep` was lowered
        (run / f"checkpoints/step-{count * 10:06d}").mkdir(parents=True)
        assert checkpoints(run, *settings, resume=run) == more
        assert checkpoints(run, *settings) == 3, "a fresh run moves it aside, which frees nothing"
    (run / "checkpoints/step-000100").mkdir()
    assert checkpoints(run, *settings, resume=run) == 0, "nothing is left to do"


@given(
    keep=st.integers(1, 4),
    every=st.integers(0, 5),
    last=st.booleans(),
    steps=st.integers(1, 20),
    standing=st.lists(st.integers(1, 20), max_size=3, unique=True),
    stopped=st.integers(0, 20),
)
def test_no_run_ever_writes_more_whether_it_is_stopped_or_not(
    keep: int, every: int, last: bool, steps: int, standing: list[int], stopped: int
) -> None:
    done = max(standing, default=0)
    section = SimpleNamespace(every=every, last=last, keep=keep)
    config = SimpleNamespace(checkpoint=section, pipeline=SimpleNamespace(steps=steps))
    there, most, saved, step = len(standing), 0, done, done
    saves = 0

    def save() -> None:
        nonlocal there, most, saved, saves
        most, there, saved, saves = max(most, there + 1), min(keep, there + 1), step, saves + 1

    while step < steps and (step < stopped or not stopped):  # the loop of `Pipeline.run`
        step += 1
        if every and step % every == 0:
            save()
    if last and saved != step:
        save()
    left = saves_left(config, done)  # type: ignore[arg-type]
    assert saves <= left
    expected = max(1, min(keep, len(standing) + left - 1) + 1 - len(standing)) if left else 0
    assert most - len(standing) <= expected or not saves
    if not stopped and done < steps:
        assert saves == left


def test_a_full_disk_is_named_before_the_start_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, never = ("checkpoint.every=0",), ("checkpoint.every=0", "checkpoint.last=false")
    room = disk_need(configured(tmp_path, *once)).total
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: SimpleNamespace(free=room))
    check_before_start(configured(tmp_path, *once))
    with pytest.raises(BundleError, match="up to 2 checkpoints"):
        check_before_start(configured(tmp_path, "checkpoint.every=10"))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: SimpleNamespace(free=room - 1))
    with pytest.raises(BundleError, match=r"a checkpoint of .* checkpoint\.last"):
        check_before_start(configured(tmp_path, *once))
    check_before_start(configured(tmp_path, *never))


def test_a_resumed_run_is_held_against_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BundleStore(tmp_path / "run/checkpoints", keep=2)
    for step in (5, 10):
        store.write(step, {}, lambda folder: (folder / "weights").touch())
    config = configured(tmp_path / "elsewhere", "checkpoint.every=5", "checkpoint.keep=2")
    need = disk_need(config, tmp_path / "run")
    assert (need.folder, need.checkpoints) == (tmp_path / "run", 1)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: SimpleNamespace(free=need.total))
    check_before_start(config, tmp_path / "run")
    with pytest.raises(BundleError, match="up to 3 checkpoints"):
        check_before_start(config)
