"""Stop a build whose next install would bring its own torch, vLLM or the like.

    python -m pip install --dry-run --report plan.json PACKAGES
    python dry_run_guard.py plan.json

pip's report (its installation report format, version 1) lists what pip would install and from where. A protected
package in that list means that constraints did not hold: it was missing from them, or somebody installs without them.
Wheels of these names on an index are built for CUDA of another version or for no GPU at all, and break the image at
the first GPU operation, long after the build.

What comes from a local folder or a git checkout of ours is a build of this image; it passes only when named with
``--built-here``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flavours import PROTECTED, ImageError, normalise

REPORT_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Planned:
    """One line of pip's plan.

    Attributes:
        name: Normalised name.
        version: The version that would be installed.
        direct: Whether it comes from a folder, a file or a git address that was named, rather than from an index.
    """

    name: str
    version: str
    direct: bool


def read_plan(path: Path) -> list[Planned]:
    """Read a report of ``pip install --dry-run --report``.

    Args:
        path: The report.

    Returns:
        What pip would install.

    Raises:
        ImageError: The file is not such a report; a guard that cannot read its input must not pass.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if report["version"] != REPORT_VERSION:
            raise ImageError(f"{path} has report version {report['version']!r}; expected {REPORT_VERSION!r}")
        return [
            Planned(normalise(item["metadata"]["name"]), item["metadata"]["version"], bool(item["is_direct"]))
            for item in report["install"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageError(f"{path} is not a report of pip ({error!r}); expected the file that --report wrote") from error


def offenders(plan: list[Planned], built_here: set[str]) -> list[Planned]:
    """Return the planned packages that must not be installed.

    Args:
        plan: What pip would install.
        built_here: Normalised names that this build may install from a folder of its own.

    Returns:
        Protected packages, except those built here and not taken from an index.
    """
    protected = {normalise(name) for name in PROTECTED}
    return [item for item in plan if item.name in protected and not (item.direct and item.name in built_here)]


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0 where the plan may be carried out, else 1.
    """
    parser = argparse.ArgumentParser(description="Refuse an install plan that holds torch, vLLM or a companion.")
    parser.add_argument("report", type=Path, help="report of `pip install --dry-run --report`")
    parser.add_argument("--built-here", action="append", default=[], metavar="NAME", help="may come from a folder")
    options = parser.parse_args(argv)
    try:
        plan = read_plan(options.report)
    except ImageError as error:
        print(f"dry-run guard: {error}", file=sys.stderr)
        return 1
    wrong = offenders(plan, {normalise(name) for name in options.built_here})
    for item in wrong:
        source = "a folder or address" if item.direct else "an index"
        print(
            f"dry-run guard: {item.name} {item.version} would be installed from {source}; expected: the base image's "
            "build stays. Pin it in the constraints file, or install what asks for it with --no-deps",
            file=sys.stderr,
        )
    if not wrong:
        print(f"dry-run guard: {len(plan)} packages planned, none of them protected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
