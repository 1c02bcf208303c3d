"""The workflows: pinned actions, the one command, and no code of ours where something can be published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def job(text: str, name: str) -> str:
    """The text of one job of a workflow, by indentation."""
    found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found, f"no job {name}"
    return found[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_the_version_stands_beside_it(path: Path) -> None:
    uses = re.findall(r"uses: *(.*)", path.read_text())
    assert uses
    for text in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", text), text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rights_are_given_job_by_job(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^permissions:( \{\}|\n  contents: read)\n", text, re.MULTILINE)
    assert "secrets." not in text
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_ci_runs_the_command_of_the_readme() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: make test" in job(text, "test")
    assert "pull_request_target" not in text
    assert "tools/verify_image.py" in job(text, "verify"), "the part of the verification that takes minutes"


def test_what_builds_cannot_publish_and_what_publishes_runs_nothing() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    publish = job(text, "publish")
    assert "id-token: write" in publish
    assert "run:" not in publish
    assert "checkout" not in publish
    assert "environment: release" in publish
    assert "needs: [build, try]" in publish
    for name in ("build", "try"):
        assert "id-token" not in job(text, name)
        # The tag is text from outside: it reaches a shell as a variable, never as source.
        assert "${{ github" not in job(text, name)
    assert "tools/release.py --tag" in job(text, "build")


def test_the_build_tools_are_those_of_the_workspace() -> None:
    from importlib import metadata

    text = (ROOT / ".github/workflows/release.yml").read_text()
    for name in ("build", "hatchling", "packaging"):
        assert f"{name}=={metadata.version(name)}" in text
