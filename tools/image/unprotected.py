"""Print the requirements of something without the packages that an image never takes from an index.

    python unprotected.py --build SOURCE-TREE       what its build needs ([build-system] requires)
    python unprotected.py --installed NAME          what an installed distribution needs at run time

vLLM's build asks for one exact torch and its run time for several companions; on a ROCm base these are there already,
in other versions. Reading the lists from the pinned source keeps the Dockerfiles free of copies that go stale.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from flavours import PROTECTED, ImageError, normalise


def unprotected(requirements: list[str]) -> list[str]:
    """Leave out protected packages, and requirements of extras.

    Args:
        requirements: Requirement lines, as in ``Requires-Dist``.

    Returns:
        The others, as they were.
    """
    protected = {normalise(name) for name in PROTECTED}
    kept = []
    for text in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", text.strip())
        of_extra = re.search(r";.*\bextra\b", text)
        if name and normalise(name[0]) not in protected and not of_extra:
            kept.append(text.strip())
    return kept


def of_build(tree: Path) -> list[str]:
    """Read what a source tree's build needs.

    Args:
        tree: A folder with a ``pyproject.toml``.

    Returns:
        Its build requirements.

    Raises:
        ImageError: The folder has none.
    """
    try:
        settings = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
        return [str(text) for text in settings["build-system"]["requires"]]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ImageError(f"{tree} has no readable [build-system] requires: {error!r}") from error


def of_installed(name: str) -> list[str]:
    """Read what an installed distribution needs.

    Args:
        name: The distribution.

    Returns:
        Its ``Requires-Dist`` lines.

    Raises:
        ImageError: It is not installed.
    """
    try:
        return list(metadata.requires(name) or [])
    except metadata.PackageNotFoundError as error:
        raise ImageError(f"{name} is not installed in {sys.executable}; expected it to be built before") from error


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where there is nothing to read.
    """
    parser = argparse.ArgumentParser(description="Print requirements without protected packages.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--build", type=Path, metavar="TREE")
    source.add_argument("--installed", metavar="NAME")
    options = parser.parse_args(argv)
    try:
        found = of_build(options.build) if options.build else of_installed(options.installed)
    except ImageError as error:
        print(f"unprotected: {error}", file=sys.stderr)
        return 1
    print("\n".join(unprotected(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
