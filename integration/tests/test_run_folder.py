"""A run folder is never written over, not used by two at a time, and only a run folder can be resumed."""

import subprocess
import sys
from pathlib import Path

import pytest
from vime_integration.errors import PipelineError, ResumeError
from vime_integration.run_folder import RunFolder


def test_a_fresh_run_moves_the_old_one_aside_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    assert folder.begin() is None
    folder.config.write_text("old")
    folder.metrics.write_text("{}\n")
    moved = folder.begin()
    assert moved is not None
    assert (moved / "config.toml").read_text() == "old"
    assert (moved / "metrics.jsonl").exists()
    assert not folder.metrics.exists()
    folder.config.write_text("new")
    again = folder.begin()
    assert again is not None
    assert again != moved
    assert (again / "config.toml").read_text() == "new"


def test_a_folder_prepared_by_somebody_else_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    assert RunFolder(root).begin() is None
    assert (root / "notes.txt").read_text() == "mine"


def test_a_run_that_goes_on_is_neither_moved_nor_joined(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    program = (
        "import sys, time; from pathlib import Path; from vime_integration.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); folder.begin(); folder.config.write_text('first')\n"
        "with folder.held(): print('up', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(folder.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        with pytest.raises(PipelineError, match=f"process {first.pid} on .* holds lock"):
            folder.begin()
        folder.reopen()
        with pytest.raises(PipelineError, match="a run is going on"), folder.held():
            pytest.fail("two runs in one folder")
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]
        first.kill()
    with folder.held():
        assert folder.config.read_text() == "first"
    assert folder.begin() is not None


@pytest.mark.parametrize("kind", ["missing", "empty", "other"])
def test_only_a_run_folder_can_be_resumed(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "somewhere"
    if kind != "missing":
        root.mkdir()
    if kind == "other":
        (root / "readme.md").write_text("no run")
    with pytest.raises(ResumeError) as caught:
        RunFolder(root).reopen()
    wanted = {"missing": "does not exist", "empty": "an empty folder", "other": "readme.md"}[kind]
    assert wanted in caught.value.seen
    assert str(root) in str(caught.value)
