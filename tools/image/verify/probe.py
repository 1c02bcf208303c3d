"""Run a piece of Python in a fresh interpreter of this environment, with a deadline.

The child starts in an empty working folder and is told what to do as JSON, so that neither the checkout nor the
state of this process can make an import work that would fail for a user. It answers with one JSON line behind a
marker; what libraries print on the way does not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARK = "@@vime-probe@@"
TAIL_LINES = 3
GRACE_S = 10.0
# LLVM aborts the process with this text where two copies of the library register their options.
DUPLICATE_LLVM = "registered more than once"
PRELUDE = f"""
import json, sys
ARGUMENT = json.loads(sys.argv[1])
def answer(value):
    sys.stdout.flush()
    print({MARK!r} + json.dumps(value), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a fresh interpreter said.

    Attributes:
        value: The object that the code passed to ``answer``; None where it did not get there.
        problem: Why it did not get there, in one line; empty where it did.
        stderr: Everything it wrote to its error stream.
    """

    value: Any
    problem: str
    stderr: str


def ask(code: str, argument: object = None, *, env: Mapping[str, str] | None = None, deadline_s: float = 300) -> Answer:
    """Run code that calls ``answer(object)`` once; it finds its argument as ``ARGUMENT``.

    Args:
        code: Python source.
        argument: Anything that JSON carries.
        env: The child's environment; this process's by default.
        deadline_s: Seconds until the child is killed.

    Returns:
        The answer, or the problem. A crash is an answer too: it is what the check is after.
    """
    with tempfile.TemporaryDirectory() as empty:
        # -P keeps the working folder off the path even where it is not empty after all (libraries write files).
        command = [sys.executable, "-P", "-c", PRELUDE + code, json.dumps(argument)]
        process = subprocess.Popen(
            command, cwd=empty, env=dict(os.environ if env is None else env), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        late = ""
        try:
            stdout, stderr = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            # The whole session: a helper that an import started would keep the pipes open for ever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = _last_words(process)
            late = f"no answer within {deadline_s:.0f} s; last words: {tail(stderr)}"
    lines = [line for line in stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return Answer(None, late or f"interpreter ended with {process.returncode}: {tail(stderr)}", stderr)
    # What happens after the answer (an abort at exit, a helper that stays) is left alone: it is not what is judged.
    return Answer(json.loads(lines[-1][len(MARK) :]), "", stderr)


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a killed child still said; a helper in another session may hold its pipes, and is not waited for."""
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.wait(GRACE_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        return "", "(a helper of the interpreter holds its pipes)"


def tail(text: str) -> str:
    """Return the last lines of an error stream as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:]) or "nothing on stderr"
