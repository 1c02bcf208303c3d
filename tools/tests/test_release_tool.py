"""Releasing a member, on a small workspace of its own with a real git, a real build and a real install."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest
import release
from packaging.version import Version
from releasing.members import ReleaseError, check_ranges, newest_section, read_members, with_version

TODAY = datetime.datetime.now(datetime.UTC).date().isoformat()
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "A member."
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
dependencies = [{dependencies}]

[project.scripts]
{name} = "{module}:main"

[tool.hatch.build.targets.sdist]
include = ["src", "tests", "README.md", "CHANGELOG.md", "LICENSE"]

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""
MODULE = '''"""A member."""

__all__ = ["main"]


def main() -> int:
    """Do nothing."""
    return 0
'''


def member(root: Path, name: str, dependencies: str = "") -> None:
    folder, module = root / "packages" / name, name.replace("-", "_")
    (folder / "src" / module).mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "tests" / f"test_{module}.py").write_text("")
    (folder / "src" / module / "__init__.py").write_text(MODULE)
    (folder / "src" / module / "py.typed").write_text("")
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, module=module, dependencies=dependencies))
    (folder / "README.md").write_text(f"# {name}\n\n" + "What it is for, in a few words. " * 5)
    (folder / "LICENSE").write_text("Apache License\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n## 0.1.1 (unreleased)\n\n- Mends a thing.\n")


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]\n')
    (root / ".gitignore").write_text("/dist/\n")
    member(root, "part-a")
    member(root, "part-b", '"part-a>=0.1,<0.2"')
    member(root, "whole", '"part-a==0.1.0", "part-b==0.1.0"')
    git(root, "init", "--quiet", "--initial-branch=main")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    commit(root)
    # Nothing of these members comes from an index, so none may be asked.
    monkeypatch.setenv("UV_OFFLINE", "1")
    return root


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "work")


def edit(root: Path, name: str, old: str, new: str, file: str = "CHANGELOG.md") -> None:
    path = root / "packages" / name / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    commit(root)


def test_a_release_is_built_tried_committed_and_tagged(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = git(workspace, "rev-parse", "HEAD")
    assert release.main(["part-b", "--root", str(workspace)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "alone: import part_b" in said
    assert "alone: part-b --help" in said
    assert git(workspace, "rev-parse", "part-b-v0.1.1^{commit}") == git(workspace, "rev-parse", "HEAD")
    assert git(workspace, "rev-parse", "HEAD~1") == before
    assert "Mends a thing." in git(workspace, "tag", "--list", "--format=%(contents)")
    members = read_members(workspace)
    assert members["part-b"].version == Version("0.1.1")
    assert members["part-a"].version == Version("0.1.0")
    assert [str(r) for r in members["whole"].requires] == ["part-a==0.1.0", "part-b==0.1.1"]
    changelog = (workspace / "packages/part-b/CHANGELOG.md").read_text()
    assert f"## 0.1.1 ({TODAY})" in changelog
    built = sorted(path.name for path in (workspace / "dist").iterdir())
    assert built == ["part_b-0.1.1-py3-none-any.whl", "part_b-0.1.1.tar.gz"]
    assert git(workspace, "worktree", "list").count("\n") == 0
    # What the workflow does with the pushed tag.
    out = workspace.parent / "out"
    assert release.main(["--tag", "part-b-v0.1.1", "--root", str(workspace), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == built
    # The same version cannot be released twice.
    with pytest.raises(ReleaseError, match=r"expected \(unreleased\)"):
        release.plan_release(workspace, "part-b", TODAY)


def test_a_dry_run_changes_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = git(workspace, "rev-parse", "HEAD")
    assert release.main(["part-a", "--dry-run", "--no-install", "--root", str(workspace)]) == 0, capsys.readouterr().err
    assert "dry run: part-a-v0.1.1 was not made" in capsys.readouterr().out
    assert git(workspace, "rev-parse", "HEAD") == before
    assert git(workspace, "status", "--porcelain") == ""
    assert git(workspace, "tag") == ""


def refusal(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    head = git(root, "rev-parse", "HEAD")
    assert release.main([name, "--no-install", "--root", str(root)]) == 1
    assert git(root, "rev-parse", "HEAD") == head, "a refused release changes nothing"
    assert git(root, "tag") == ""
    assert git(root, "worktree", "list").count("\n") == 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "old", "new", "file", "said"),
    [
        ("part-a", "- Mends a thing.", "Soon.", "CHANGELOG.md", "says nothing of 0.1.1"),
        ("part-a", "(unreleased)", "(2026-01-01)", "CHANGELOG.md", "expected (unreleased)"),
        ("part-a", "## 0.1.1", "## next", "CHANGELOG.md", "expected a version after ##"),
        ("part-a", "## 0.1.1 (unreleased)", "", "CHANGELOG.md", "has no section"),
        ("part-a", "0.1.1 (unr", "0.0.9 (unr", "CHANGELOG.md", "expected no less"),
        (
            "part-a",
            "0.1.1 (unr",
            "0.2.0 (unr",
            "CHANGELOG.md",
            "part-a<0.2,>=0.1, which leaves 0.2.0 out",
        ),
        ("part-b", "part-a>=0.1,<0.2", "part-b>=0.1", "pyproject.toml", "expected a range such as part-b>=0.1,<0.2"),
        ("part-a", 'license = "Apache-2.0"', "", "pyproject.toml", "License-Expression is None"),
        ("part-a", '"src", "tests", "README.md"', '"src", "README.md"', "pyproject.toml", "the sdist has no tests"),
        ("part-a", "dependencies = []", 'dependencies = ["x @ file:///x"]', "pyproject.toml", "build"),
        (
            "part-a",
            'version = "0.1.0"\n',
            'version = "0.1.0"\n\n[tool.x]\nversion = "1"\n',
            "pyproject.toml",
            "expected one",
        ),
    ],
)
def test_refusals(
    workspace: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, file: str, said: str
) -> None:
    edit(workspace, name, old, new, file)
    assert said in refusal(workspace, name, capsys)


def test_an_unclean_tree_and_a_wrong_name_are_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected one of part-a, part-b, whole" in refusal(workspace, "part-c", capsys)
    (workspace / "packages/part-a/README.md").write_text("changed")
    assert "expected a clean tree" in refusal(workspace, "part-a", capsys)


def test_a_wheel_without_its_type_marker_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "packages/part-a/src/part_a/py.typed").unlink()
    commit(workspace)
    assert "the wheel has no py.typed" in refusal(workspace, "part-a", capsys)


def test_a_door_that_promises_what_it_lacks_fails_the_smoke_test(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(workspace, "part-a", '["main"]', '["main", "absent"]', "src/part_a/__init__.py")
    assert release.main(["part-a", "--root", str(workspace)]) == 1
    assert "names missing from its door: ['absent']" in capsys.readouterr().err


def test_an_older_version_than_a_tag_is_refused(workspace: Path) -> None:
    git(workspace, "tag", "part-a-v0.3.0")
    with pytest.raises(ReleaseError, match=r"0\.1\.1 is not newer than 0\.3\.0"):
        release.plan_release(workspace, "part-a", TODAY)


@pytest.mark.parametrize("tag", ["part-c-v0.1.0", "part-a", "part-a-v0.1.0", "part-a-v9.9.9"])
def test_a_tag_that_disagrees_builds_nothing(workspace: Path, tag: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = workspace.parent / "out"
    assert release.main(["--tag", tag, "--root", str(workspace), "--out", str(out)]) == 1
    assert "expected" in capsys.readouterr().err
    assert not out.exists()


def test_only_the_newest_section_is_read() -> None:
    text = "# C\n\n## 0.2.0 (unreleased)\n\n- New.\n\n## 0.1.0 (2026-01-01)\n\n- Old.\n"
    section = newest_section(text, Path("CHANGELOG.md"))
    assert (str(section.version), section.when, section.text) == ("0.2.0", "unreleased", "- New.")


def test_the_version_line_is_the_only_change() -> None:
    text = 'name = "a"\nversion = "0.1.0"\nrequires-python = ">=3.11"\n'
    assert with_version(text, Version("0.2.0"), Path("p")) == text.replace("0.1.0", "0.2.0")


def test_the_members_of_this_workspace_allow_each_other() -> None:
    members = read_members(Path(__file__).resolve().parents[2])
    assert set(members) == {f"vime-{n}" for n in ("devices", "sync", "megatron", "rollout", "grpo", "integration")}
    for name, one in members.items():
        # Only vime-integration pins exactly: it is the tested set.
        assert [m.name for m in check_ranges(members, name, one.version)] in ([], ["vime-integration"])
