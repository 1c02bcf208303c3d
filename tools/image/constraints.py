"""Write a pip constraints file from what the base image has installed.

    python constraints.py --output constraints.txt --record base.json
    python constraints.py --output constraints.txt --unchanged-since base.json --also numpy

The first call stands before the first install that could touch torch. It also writes a record of what the base
shipped: version and content digest of every protected package. Later calls add what was built meanwhile (vLLM) and
compare with the record, so that a replaced torch stops the build at the step that replaced it.

Without torch there is nothing to protect and something is badly wrong with the base, so that is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flavours import PROTECTED, Flavour, ImageError, installed_flavours

HEADER = "# Generated from what this image has installed; every later install runs under it."


def render(found: dict[str, Flavour]) -> str:
    """Return the text of a constraints file.

    Args:
        found: What to pin.

    Returns:
        One exact pin a line, sorted; local versions included, which no index offers.

    Raises:
        ImageError: torch is not among them.
    """
    if "torch" not in found:
        raise ImageError(
            f"no torch in {sys.executable} (seen: {', '.join(sorted(found)) or 'no protected package'}); expected the "
            "torch that the base image ships. Check the base image, and that this is its own interpreter"
        )
    return "\n".join([HEADER, *(f"{f.name}=={f.version}" for _, f in sorted(found.items()))]) + "\n"


def changes(before: dict[str, dict[str, str]], found: dict[str, Flavour]) -> list[str]:
    """Compare with a record.

    Args:
        before: The ``packages`` of a record.
        found: What is installed now.

    Returns:
        A sentence for each package that is gone, has another version, or has other files at the same version.
    """
    wrong: list[str] = []
    for name, was in sorted(before.items()):
        now = found.get(name)
        if now is None:
            wrong.append(f"{name} {was['version']} is gone")
        elif now.version != was["version"]:
            wrong.append(f"{name} was {was['version']} and is {now.version}")
        elif was["digest"] and now.digest != was["digest"]:
            wrong.append(f"{name} {now.version} was rebuilt: its files are not those of the base")
    return wrong


def require_unchanged(record: Path, found: dict[str, Flavour]) -> None:
    """Stop where a package of the base is not what it was.

    Args:
        record: What an earlier call wrote with ``--record``.
        found: What is installed now.

    Raises:
        ImageError: Something changed.
    """
    before = json.loads(record.read_text(encoding="utf-8"))["packages"]
    if wrong := changes(before, found):
        raise ImageError(
            f"{'; '.join(wrong)}. Expected what {record} holds: find the install that ran without the constraints file"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where the build must stop.
    """
    parser = argparse.ArgumentParser(description="Pin what the base image has installed.")
    parser.add_argument("--output", type=Path, required=True, help="constraints file to write")
    parser.add_argument("--record", type=Path, help="write versions and content digests here, for later comparison")
    parser.add_argument("--unchanged-since", type=Path, metavar="RECORD", help="fail where a recorded package changed")
    parser.add_argument("--also", action="append", default=[], metavar="NAME", help="pin this distribution too")
    options = parser.parse_args(argv)
    try:
        found = installed_flavours((*PROTECTED, *options.also))
        text = render(found)
        if options.unchanged_since is not None:
            require_unchanged(options.unchanged_since, found)
    except ImageError as error:
        print(f"constraints: {error}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    if options.record is not None:
        packages = {f.name: {"version": f.version, "digest": f.digest} for f in found.values()}
        options.record.write_text(json.dumps({"packages": packages}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
