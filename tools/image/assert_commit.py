"""Assert that a checkout is exactly the commit it should be.

    python assert_commit.py DIRECTORY COMMIT [--tag TAG]

A tag can be moved and a branch moves by nature; only the full commit names a content. So the expectation must be 40
hex digits, HEAD must equal it, a tag (where one is given) must point at it, and tracked files must be unchanged.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from flavours import ImageError

FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
GIT_DEADLINE_S = 120


def git(directory: Path, *arguments: str) -> str:
    """Run git in a checkout, whoever owns it.

    Args:
        directory: The checkout.
        arguments: What to ask.

    Returns:
        Its output, stripped.

    Raises:
        ImageError: git failed or did not answer in time.
    """
    command = ["git", "-c", f"safe.directory={directory.resolve()}", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=True)
    except subprocess.CalledProcessError as error:
        raise ImageError(f"`git {' '.join(arguments)}` failed in {directory}: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"`git {' '.join(arguments)}` did not run in {directory}: {error}") from error
    return done.stdout.strip()


def check(directory: Path, commit: str, tag: str = "") -> str:
    """Compare a checkout with its pin.

    Args:
        directory: The checkout.
        commit: The expected commit, 40 hex digits.
        tag: A tag that must point at it.

    Returns:
        A sentence that says what holds.

    Raises:
        ImageError: It does not; the text holds what was seen and what was expected.
    """
    if not FULL_COMMIT.fullmatch(commit):
        raise ImageError(f"{commit!r} is not a full commit; expected 40 hex digits, because short names and tags move")
    head = git(directory, "rev-parse", "HEAD")
    if head != commit:
        raise ImageError(f"{directory} is at {head}; expected {commit}")
    if tag:
        pointed = git(directory, "rev-parse", f"refs/tags/{tag}^{{commit}}")
        if pointed != commit:
            raise ImageError(f"tag {tag} of {directory} points at {pointed}; expected {commit}: the tag was moved")
    if changed := git(directory, "status", "--porcelain", "--untracked-files=no"):
        raise ImageError(f"{directory} has changed files ({changed.splitlines()[0].strip()}, ...); expected none")
    return f"{directory} is at {commit}" + (f", as tag {tag} says" if tag else "")


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where the checkout is something else.
    """
    parser = argparse.ArgumentParser(description="Assert that a checkout is at one full commit.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("commit", help="40 hex digits")
    parser.add_argument("--tag", default="", help="a tag that must point at the commit")
    options = parser.parse_args(argv)
    try:
        print(f"assert commit: {check(options.directory, options.commit, options.tag)}")
    except ImageError as error:
        print(f"assert commit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
