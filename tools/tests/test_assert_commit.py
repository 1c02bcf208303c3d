"""Pins of git coordinates: the assertion and the fetch that ends with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import assert_commit
import pytest
from flavours import ImageError

FETCH = Path(__file__).resolve().parents[1] / "image" / "fetch_commit.sh"
IDENTITY = {
    f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in (("NAME", "a"), ("EMAIL", "a@b"))
}


def git(folder: Path, *arguments: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **IDENTITY}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], env=env, check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    # What the public hosts allow: fetching any commit that a reference reaches.
    git(folder, "config", "uploadpack.allowReachableSHA1InWant", "true")
    for number in (1, 2):
        (folder / "file").write_text(str(number))
        git(folder, "add", "file")
        git(folder, "commit", "--quiet", "-m", str(number))
        git(folder, "tag", "-a", f"v{number}", "-m", "annotated")
    return folder


def test_accepts_the_commit_and_its_tag(origin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = git(origin, "rev-parse", "HEAD")
    assert assert_commit.main([str(origin), head, "--tag", "v2"]) == 0
    assert f"is at {head}, as tag v2 says" in capsys.readouterr().out


@pytest.mark.parametrize("commit", ["main", "v2", "98dff2a", "98DFF2A81D747D1DBA01A47F939F48C3526D4206", "0" * 39])
def test_only_a_full_commit_is_a_pin(origin: Path, commit: str) -> None:
    with pytest.raises(ImageError, match="is not a full commit; expected 40 hex digits"):
        assert_commit.check(origin, commit)


def test_another_commit_is_named(origin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert assert_commit.main([str(origin), "0" * 40]) == 1
    assert f"is at {git(origin, 'rev-parse', 'HEAD')}; expected {'0' * 40}" in capsys.readouterr().err


def test_a_moved_tag_is_named(origin: Path) -> None:
    with pytest.raises(ImageError, match="the tag was moved"):
        assert_commit.check(origin, git(origin, "rev-parse", "HEAD"), "v1")


def test_changed_files_are_named(origin: Path) -> None:
    (origin / "file").write_text("patched")
    with pytest.raises(ImageError, match="has changed files"):
        assert_commit.check(origin, git(origin, "rev-parse", "HEAD"))


def test_a_folder_without_history_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="failed in"):
        assert_commit.check(tmp_path, "0" * 40)


def fetch(*arguments: str | Path, commits: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FETCH), *map(str, arguments)],
        env=os.environ | {"COMMITS": commits},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_fetches_one_commit(origin: Path, tmp_path: Path) -> None:
    first = git(origin, "rev-parse", "v1^{commit}")
    for name, tag in (("by-commit", []), ("by-tag", ["v1"])):
        done = fetch(tmp_path / name, f"file://{origin}", first, *tag)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name / "file").read_text() == "1"
        assert git(tmp_path / name, "rev-list", "--count", "HEAD") == "1"


def test_what_was_fetched_is_kept_for_the_manifest(origin: Path, tmp_path: Path) -> None:
    first, record = git(origin, "rev-parse", "v1^{commit}"), tmp_path / "commits"
    for name in ("megatron", "vllm"):
        assert fetch(tmp_path / name, f"file://{origin}", first, commits=str(record)).returncode == 0
    assert record.read_text() == f"megatron {first}\nvllm {first}\n"
    assert fetch(tmp_path / "other", f"file://{origin}", "0" * 40, commits=str(record)).returncode != 0
    assert "other" not in record.read_text(), "what is not what it should be is not recorded"


def test_fetching_a_moved_tag_fails(origin: Path, tmp_path: Path) -> None:
    pinned = git(origin, "rev-parse", "v1^{commit}")
    git(origin, "tag", "--force", "v1", "v2")
    done = fetch(tmp_path / "copy", f"file://{origin}", pinned, "v1")
    assert done.returncode == 1
    assert f"expected {pinned}" in done.stderr
