"""What a stage says goes to its log: standard output of its process."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write one line, or several, to the stage's log."""
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
