"""A manifest names the commits: of a checkout, of an installation, and of what an image was built from."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vime_integration.accept import provenance
from vime_integration.accept.provenance import UNKNOWN, image_commits, own_commit


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.example", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout"
    (folder / "integration").mkdir(parents=True)
    (folder / "integration" / "file").write_text("1")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def installed_from(monkeypatch: pytest.MonkeyPatch, place: Path, info: dict[str, Any] | None) -> None:
    """Let the package run from a folder without history, installed as pip says it was."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if info is None else json.dumps(info)

    monkeypatch.setattr(provenance, "__file__", str(place / "site" / "provenance.py"))
    monkeypatch.setattr(metadata, "distribution", lambda _name: Distribution())


def test_an_installation_from_a_checkout_names_its_commit(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    installed_from(monkeypatch, tmp_path, {"url": (checkout / "integration").as_uri(), "dir_info": {}})
    head = git(checkout, "rev-parse", "HEAD")
    assert own_commit() == head
    (checkout / "integration" / "file").write_text("2")
    assert own_commit() == f"{head} (with uncommitted changes)"


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"url": "https://host.example/vime.git", "vcs_info": {"vcs": "git", "commit_id": "a" * 40}}, "a" * 40),
        ({"url": "https://host.example/vime-0.1.0.whl"}, UNKNOWN),
        ({"url": "file:///nowhere/at/all"}, UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_other_installations(
    info: dict[str, Any] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    installed_from(monkeypatch, tmp_path, info)
    assert own_commit() == expected


def test_what_an_image_was_built_from(tmp_path: Path) -> None:
    record = tmp_path / "commits"
    assert image_commits(record) == {}
    record.write_text(f"vllm {'a' * 40}\nmegatron {'b' * 40}\n\n")
    assert image_commits(record) == {"vllm": "a" * 40, "megatron": "b" * 40}
