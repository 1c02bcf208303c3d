"""Build a member's sdist and wheel, and check what they say and hold."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from releasing.members import Member, ReleaseError

BUILD_DEADLINE_S = 300
SDIST_FILES = ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml")


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build with the backend that is installed here; nothing is downloaded.

    Args:
        source: The member's folder.
        out: Where to put the files; it must hold none of them yet.

    Returns:
        Paths of the sdist and of the wheel, which is built from the sdist.

    Raises:
        ReleaseError: The build failed, or made something else than one of each.
    """
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        raise ReleaseError(
            f"building {source} failed: {error.stdout.strip()[-500:]} {error.stderr.strip()[-500:]}"
        ) from error
    made = sorted(set(out.iterdir()) - before)
    sdists = [path for path in made if path.name.endswith(".tar.gz")]
    wheels = [path for path in made if path.suffix == ".whl"]
    if len(sdists) != 1 or len(wheels) != 1:
        raise ReleaseError(f"building {source} made {[path.name for path in made]}; expected one sdist and one wheel")
    return sdists[0], wheels[0]


def check(member: Member, version: Version, sdist: Path, wheel: Path) -> None:
    """Check the metadata and the content of both files.

    Args:
        member: What was built.
        version: The version that was meant.
        sdist: The source distribution.
        wheel: The wheel.

    Raises:
        ReleaseError: With everything that is wrong with them.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        inner = next(name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(inner).decode())
    wrong = _metadata_faults(member, version, metadata)
    if f"{member.module}/py.typed" not in files:
        wrong.append("the wheel has no py.typed")
    stray = [
        name for name in files if not name.startswith((f"{member.module}/", f"{member.module}-{version}.dist-info/"))
    ]
    if stray:
        wrong.append(f"the wheel installs files outside of {member.module}: {stray[:3]}")
    with tarfile.open(sdist) as archive_of_source:
        top = f"{member.module}-{version}/"
        names = {name.removeprefix(top) for name in archive_of_source.getnames()}
    wrong += [f"the sdist has no {name}" for name in SDIST_FILES if name not in names]
    if not any(name.startswith("tests/") for name in names):
        wrong.append("the sdist has no tests")
    if wrong:
        raise ReleaseError(f"{member.name} {version}: {'; '.join(wrong)}")


def _metadata_faults(member: Member, version: Version, metadata: Message) -> list[str]:
    wrong: list[str] = []
    for field, expected in (("Name", member.name), ("Version", str(version)), ("License-Expression", "Apache-2.0")):
        if metadata[field] != expected:
            wrong.append(f"{field} is {metadata[field]!r}, expected {expected!r}")
    required = ("Summary", "Requires-Python", "License-File")
    wrong += [f"{field} is missing" for field in required if not metadata[field]]
    if metadata["Description-Content-Type"] != "text/markdown" or len(str(metadata.get_payload()).split()) < 20:
        wrong.append("the README is not its description")
    if any("Private" in text for text in metadata.get_all("Classifier", [])):
        wrong.append("it is marked as private")
    addresses = [text for text in metadata.get_all("Requires-Dist", []) if Requirement(text).url]
    wrong += [f"it requires {text}: an address, which an index refuses" for text in addresses]
    return wrong
