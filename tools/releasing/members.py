"""Members of the workspace: version, changelog, and what they ask of each other.

The changelog decides the version. Its first section is ``## 0.2.0 (unreleased)`` while work goes on; releasing writes
the date in place of the word, and the version into ``pyproject.toml``. So there is no release without words about it.

Members depend on each other by a range with both ends (``>=0.1,<0.2``), and vime-integration by exact pins: it is the
set that was tested. A release that another member's range leaves out is refused; exact pins move with the release,
because the workspace could not be resolved otherwise.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

UNRELEASED = "unreleased"
_SECTION = re.compile(r"^## (?P<version>\S+)(?: \((?P<when>[^)]*)\))?$", re.MULTILINE)
_VERSION_LINE = re.compile(r'^version = "[^"]*"$', re.MULTILINE)


class ReleaseError(Exception):
    """A release that must not be made; the text says what was seen, what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class Member:
    """One distribution of the workspace.

    Attributes:
        name: Its distribution name.
        folder: Its folder, relative to the workspace.
        version: The version in its ``pyproject.toml``.
        requires: Its dependencies, extras included.
    """

    name: str
    folder: Path
    version: Version
    requires: tuple[Requirement, ...]

    @property
    def module(self) -> str:
        """Its import name."""
        return self.name.replace("-", "_")

    def tag(self, version: Version) -> str:
        """Return the tag of a release."""
        return f"{self.name}-v{version}"


@dataclass(frozen=True, slots=True)
class Section:
    """The newest section of a changelog.

    Attributes:
        version: Its version.
        when: What stands in parentheses: a date, or ``unreleased``.
        text: What it says.
    """

    version: Version
    when: str
    text: str


def read_members(root: Path) -> dict[str, Member]:
    """Read the workspace.

    Args:
        root: Its root, with the ``[tool.uv.workspace]`` table.

    Returns:
        Members by name.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    members: dict[str, Member] = {}
    for pattern in settings["tool"]["uv"]["workspace"]["members"]:
        for path in sorted(root.glob(f"{pattern}/pyproject.toml")):
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
            lines = [*project.get("dependencies", [])]
            lines += [line for extra in project.get("optional-dependencies", {}).values() for line in extra]
            folder = path.parent.relative_to(root)
            requires = tuple(Requirement(line) for line in lines)
            members[project["name"]] = Member(project["name"], folder, Version(project["version"]), requires)
    return members


def newest_section(changelog: str, where: Path) -> Section:
    """Read the first section of a changelog.

    Args:
        changelog: Its text.
        where: Its path, for messages.

    Returns:
        The section.

    Raises:
        ReleaseError: There is none, its version is not one, or it says nothing.
    """
    heads = list(_SECTION.finditer(changelog))
    if not heads:
        raise ReleaseError(f"{where} has no section; expected `## 1.2.3 ({UNRELEASED})`")
    end = heads[1].start() if len(heads) > 1 else len(changelog)
    text = changelog[heads[0].end() : end].strip()
    try:
        version = Version(heads[0]["version"])
    except InvalidVersion as error:
        raise ReleaseError(f"{where} begins with {heads[0][0]!r}; expected a version after ##") from error
    if not re.search(r"^- \S", text, re.MULTILINE):
        raise ReleaseError(f"{where} says nothing of {version}; expected at least one line that begins with `- `")
    return Section(version, heads[0]["when"] or "", text)


def check_ranges(members: dict[str, Member], name: str, version: Version) -> list[Member]:
    """Check what the other members ask of this one.

    Args:
        members: The workspace.
        name: The member to be released.
        version: Its new version.

    Returns:
        Members with an exact pin, which has to move.

    Raises:
        ReleaseError: A range of another member leaves the version out, or has one end only.
    """
    pinned: list[Member] = []
    for member in members.values():
        for requirement in member.requires:
            if requirement.name != name:
                continue
            operators = {clause.operator for clause in requirement.specifier}
            if operators == {"=="}:
                pinned.append(member)
            elif operators != {">=", "<"}:
                raise ReleaseError(f"{member.name} asks for {requirement}; expected a range such as {name}>=0.1,<0.2")
            elif not requirement.specifier.contains(version, prereleases=True):
                raise ReleaseError(
                    f"{member.name} asks for {requirement}, which leaves {version} out; widen it once its tests pass"
                )
    return pinned


def with_version(pyproject: str, version: Version, where: Path) -> str:
    """Set the version in a ``pyproject.toml``.

    Args:
        pyproject: Its text.
        version: The new version.
        where: Its path, for messages.

    Returns:
        The new text; everything else is as it was.

    Raises:
        ReleaseError: There is not exactly one version line.
    """
    text, count = _VERSION_LINE.subn(f'version = "{version}"', pyproject)
    if count != 1:
        raise ReleaseError(f'{where} has {count} lines of the form `version = "..."`; expected one')
    return text


def with_pin(pyproject: str, name: str, version: Version) -> str:
    """Move the exact pins of a distribution.

    Args:
        pyproject: Text of a ``pyproject.toml``.
        name: The distribution.
        version: The version to pin.

    Returns:
        The new text.
    """
    return re.sub(rf'"{re.escape(name)}==[^"]*"', f'"{name}=={version}"', pyproject)


def with_date(changelog: str, section: Section, date: str) -> str:
    """Date the newest section.

    Args:
        changelog: Text of a changelog.
        section: Its newest section.
        date: The day, ISO 8601.

    Returns:
        The new text.
    """
    return changelog.replace(f"## {section.version} ({section.when})", f"## {section.version} ({date})", 1)
