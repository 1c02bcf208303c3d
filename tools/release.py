"""Release one member of the workspace.

    python tools/release.py vime-sync --dry-run      everything but the commit and the tag
    python tools/release.py vime-sync                and those, locally; pushing the tag is yours to do
    python tools/release.py --tag vime-sync-v0.2.0   what CI does with a pushed tag: check it and build from it

Steps: the changelog's newest section is the version, and it must say something; the other members' ranges must admit
it; version, date and exact pins are written; sdist and wheel are built and checked; the wheel is installed alone and
tried; commit and tag. All but the last happens in a temporary worktree of HEAD, so that a release which fails leaves
nothing behind, and one which succeeds was built from what is committed.

Exit: 0; 1 with one line that says what stopped it.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from releasing import artifacts
from releasing.members import (
    UNRELEASED,
    Member,
    ReleaseError,
    Section,
    check_ranges,
    newest_section,
    read_members,
    with_date,
    with_pin,
    with_version,
)
from releasing.smoke import smoke

GIT_DEADLINE_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What a release changes.

    Attributes:
        member: Who is released.
        section: Its changelog's newest section.
        texts: New content of files, by path relative to the workspace.
    """

    member: Member
    section: Section
    texts: dict[Path, str]

    @property
    def tag(self) -> str:
        """The tag to make."""
        return self.member.tag(self.section.version)


def git(root: Path, *arguments: str) -> str:
    """Run git in a folder.

    Args:
        root: The folder.
        arguments: What to do.

    Returns:
        Its output, stripped.

    Raises:
        ReleaseError: It failed.
    """
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False)
    if done.returncode:
        raise ReleaseError(f"`git {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def plan_release(root: Path, name: str, date: str) -> Plan:
    """Decide the version and the texts.

    Args:
        root: The workspace.
        name: The member.
        date: The day of the release, ISO 8601.

    Returns:
        The plan; nothing is written.

    Raises:
        ReleaseError: The release must not be made.
    """
    members = read_members(root)
    if name not in members:
        raise ReleaseError(f"no member {name!r}; expected one of {', '.join(sorted(members))}")
    member = members[name]
    changelog = member.folder / "CHANGELOG.md"
    section = newest_section((root / changelog).read_text(encoding="utf-8"), changelog)
    if section.when != UNRELEASED:
        raise ReleaseError(f"{changelog} begins with {section.version} ({section.when}); expected ({UNRELEASED})")
    if section.version < member.version:
        raise ReleaseError(f"{changelog} is at {section.version}, pyproject.toml at {member.version}; expected no less")
    _require_newer(root, member, section.version)
    pinned = check_ranges(members, name, section.version)
    own = member.folder / "pyproject.toml"
    texts = {
        changelog: with_date((root / changelog).read_text(encoding="utf-8"), section, date),
        own: with_version((root / own).read_text(encoding="utf-8"), section.version, own),
    }
    for other in pinned:
        path = other.folder / "pyproject.toml"
        texts[path] = with_pin((root / path).read_text(encoding="utf-8"), name, section.version)
    return Plan(member, section, texts)


def _require_newer(root: Path, member: Member, version: Version) -> None:
    tags = git(root, "tag", "--list", f"{member.name}-v*").split()
    released = [Version(tag.removeprefix(f"{member.name}-v")) for tag in tags]
    if released and version <= max(released):
        raise ReleaseError(f"{member.name} {version} is not newer than {max(released)}, the newest tag")


def require_clean(root: Path) -> None:
    """Refuse to release what is not committed.

    Args:
        root: The workspace.

    Raises:
        ReleaseError: Tracked files are changed.
    """
    if changed := git(root, "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError(
            f"changed files: {', '.join(changed.split()[1::2][:3])}; expected a clean tree: commit first"
        )


@contextmanager
def worktree(root: Path) -> Iterator[Path]:
    """Check HEAD out into a temporary folder.

    Args:
        root: The workspace.

    Yields:
        The folder; it is gone afterwards.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "tree"
        git(root, "worktree", "add", "--quiet", "--detach", str(folder), "HEAD")
        try:
            yield folder
        finally:
            git(root, "worktree", "remove", "--force", str(folder))


def build_and_try(tree: Path, member: Member, version: Version, out: Path, *, install: bool) -> list[str]:
    """Build a member, check the files, install the wheel alone and use it.

    Args:
        tree: A workspace with the version written.
        member: Who is released.
        version: Its version.
        out: Where sdist and wheel go.
        install: Whether to install and try it.

    Returns:
        What was done, for the reader.

    Raises:
        ReleaseError: A step failed.
    """
    for stale in out.glob(f"{member.module}-{version}*"):
        stale.unlink()
    sdist, wheel = artifacts.build(tree / member.folder, out)
    artifacts.check(member, version, sdist, wheel)
    done = [f"built and checked {sdist.name} and {wheel.name}"]
    if install:
        with tempfile.TemporaryDirectory() as siblings:
            members = read_members(tree)
            for name in sorted(_siblings(members, member)):
                artifacts.build(tree / members[name].folder, Path(siblings))
            done += [f"alone: {text}" for text in smoke(tree, member, str(version), wheel, Path(siblings))]
    return done


def _siblings(members: dict[str, Member], member: Member) -> set[str]:
    found: set[str] = set()
    waiting = [member]
    while waiting:
        names = {r.name for r in waiting.pop().requires if r.name in members} - found - {member.name}
        found |= names
        waiting += [members[name] for name in names]
    return found


def release(root: Path, name: str, *, dry_run: bool, install: bool) -> list[str]:
    """Make a release.

    Args:
        root: The workspace.
        name: The member.
        dry_run: Stop before the commit and the tag.
        install: Whether to install the wheel alone and try it.

    Returns:
        What was done, for the reader.

    Raises:
        ReleaseError: It must not be made; nothing was changed.
    """
    require_clean(root)
    plan = plan_release(root, name, datetime.datetime.now(datetime.UTC).date().isoformat())
    with worktree(root) as tree, tempfile.TemporaryDirectory() as text:
        for path, content in plan.texts.items():
            (tree / path).write_text(content, encoding="utf-8")
        done = build_and_try(tree, plan.member, plan.section.version, Path(text), install=install)
        (root / "dist").mkdir(exist_ok=True)
        for path in Path(text).iterdir():
            shutil.copy(path, root / "dist" / path.name)
    if dry_run:
        return [*done, f"dry run: {plan.tag} was not made; would change {', '.join(map(str, plan.texts))}"]
    for path, content in plan.texts.items():
        (root / path).write_text(content, encoding="utf-8")
    message = f"Release {name} {plan.section.version}"
    git(root, "commit", "--quiet", "-m", message, "-m", plan.section.text, "--", *map(str, plan.texts))
    git(root, "tag", "--annotate", plan.tag, "-m", f"{message}\n\n{plan.section.text}")
    return [*done, f"tagged {plan.tag}; `git push origin HEAD {plan.tag}` publishes it"]


def build_tag(root: Path, tag: str, out: Path) -> list[str]:
    """Build what a tag names, from a checkout of that tag.

    Args:
        root: The checkout.
        tag: ``<name>-v<version>``.
        out: Where sdist and wheel go.

    Returns:
        What was done, for the reader.

    Raises:
        ReleaseError: Tag, version and changelog disagree, or the build failed.
    """
    name, _, text = tag.rpartition("-v")
    members = read_members(root)
    if name not in members:
        raise ReleaseError(f"tag {tag!r} names no member; expected <name>-v<version> with one of {', '.join(members)}")
    member = members[name]
    section = newest_section((root / member.folder / "CHANGELOG.md").read_text(encoding="utf-8"), member.folder)
    if text != str(member.version) or section.version != member.version or section.when in ("", UNRELEASED):
        raise ReleaseError(
            f"tag {tag}, pyproject.toml {member.version}, changelog {section.version} ({section.when}); expected one "
            "version and a date: make the tag with tools/release.py"
        )
    return build_and_try(root, member, member.version, out, install=False)


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where the release was stopped.
    """
    parser = argparse.ArgumentParser(description="Release one member of the workspace.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", help="the member, such as vime-sync")
    what.add_argument("--tag", help="check this tag and build from the present checkout; nothing is committed")
    parser.add_argument("--dry-run", action="store_true", help="stop before the commit and the tag")
    parser.add_argument("--no-install", action="store_true", help="do not install the wheel alone (CI does it later)")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the workspace")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="with --tag: where the files go")
    options = parser.parse_args(argv)
    try:
        if options.tag:
            done = build_tag(options.root, options.tag, options.out)
        else:
            done = release(options.root, options.name, dry_run=options.dry_run, install=not options.no_install)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print("\n".join(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
