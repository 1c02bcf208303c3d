"""Stages that misbehave, for the supervisor's tests; a stage is found by name in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from vime_integration.accept import Acceptance, Report, Threshold

GOOD = Threshold("x", "1", "1", holds=True)


def passes(acceptance: Acceptance) -> Report:
    print("said on the way")
    return Report([GOOD], {"steps": acceptance.steps})


def compares_nothing(_acceptance: Acceptance) -> Report:
    return Report()


def is_below(_acceptance: Acceptance) -> Report:
    return Report([GOOD, Threshold("speed", "3 GB/s", "at least 5", holds=False)])


def is_skipped(_acceptance: Acceptance) -> Report:
    return Report(skipped="one GPU")


def raises(_acceptance: Acceptance) -> Report:
    raise ValueError("a bad value")


def aborts(_acceptance: Acceptance) -> Report:
    print("about to abort", flush=True)
    os.abort()


def hangs(acceptance: Acceptance) -> Report:
    _child(acceptance)
    print("waiting for a driver", flush=True)
    time.sleep(600)
    return Report([GOOD])


def leaves_a_child(acceptance: Acceptance) -> Report:
    _child(acceptance)
    return Report([GOOD])


def _child(acceptance: Acceptance) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(acceptance.out) / "child").write_text(str(child.pid))
