"""The child side of a worker reward: grades payloads from stdin, one JSON line each, until stdin ends.

An answer is written at once, before the next payload may end the process, to a file that nobody waits for. One byte to
stdout says that the worker is ready, and after each empty line that all payloads before it are graded.

Symbolic mathematics can run for hours on one odd response and cannot be interrupted from inside, so every payload is
graded under a process timer with its default action: the kernel ends this process when the time is over. That holds
even when the parent is gone, so a mad grader never outlives its run by more than one time-out.

Usage: ``python -m vime_rollout.rewards.worker MODULE:FUNCTION DESCRIPTOR``, that of the file for the answers
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module

from vime_rollout.errors import RewardError


def main() -> None:
    """Answer lines of ``{"timeout_s", "payload"}`` with lines of ``{"value", "reason"}`` or ``{"error"}``."""
    # Graders print; the pipe to the parent must carry nothing else. (Both descriptors here are not inherited.)
    done = os.dup(sys.stdout.fileno())
    answers = int(sys.argv[2])
    os.set_inheritable(answers, False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes stdin
    module, _, attribute = sys.argv[1].partition(":")
    grade = getattr(import_module(module), attribute)
    os.write(done, b".")
    for line in sys.stdin:
        if line == "\n":
            os.write(done, b".")
            continue
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            value, reason = grade(request["payload"])
            answer = {"value": float(value), "reason": reason}
        except RewardError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the edge of a process: the parent raises it, with its cause
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
