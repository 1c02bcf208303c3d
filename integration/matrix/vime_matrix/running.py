"""Makes environments with uv and runs checks in them, each in a process group of its own under a deadline.

An environment lives under ``.tools/matrix`` of the checkout and is kept: installing it again takes seconds.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vime_matrix.definition import FOLDER, ROOT, Cell, Definition, Refusal
from vime_matrix.machine import Machine, interpreter
from vime_matrix.results import Outcome, Record

INSTALL_DEADLINE_S = 1800.0
CHECK_DEADLINE_S = {"light": 1200.0, "megatron": 2400.0, "interface": 300.0}
PIPELINE_DEADLINE_S = 900.0
GIT_DEADLINE_S = 30.0
TAIL = 300
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what the matrix is run.

    Attributes:
        folder: Environments and logs.
        uv: The resolver.
        machine: This machine.
        commit: What of vime is run.
    """

    folder: Path
    uv: Path
    machine: Machine
    commit: str


def present_commit() -> str:
    """Return the commit of the checkout, marked where tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(  # noqa: S603 - git, and arguments of ours
            command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=True
        ).stdout.strip()

    # What a run of the matrix itself writes is no change of what it runs.
    own = [f":!{path.relative_to(ROOT)}" for path in (FOLDER, FOLDER.parent / "README.md")]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *own)
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def make_environment(definition: Definition, cell: Cell, place: Place) -> tuple[Path | None, str]:
    """Make the environment of a cell, or bring it up to date.

    Args:
        definition: The matrix.
        cell: A cell of it.
        place: Where.

    Returns:
        Its interpreter, or None and the reason.
    """
    target = place.folder / cell.environment
    python = target / "bin" / "python"
    log = place.folder / f"{cell.environment}.install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    steps: list[list[str]] = []
    if not python.exists():
        steps.append([str(place.uv), "venv", "--quiet", "--python", interpreter(cell.python, place.uv), str(target)])
    # `--reinstall` of our own members only: their versions do not change with their source.
    ours = [f"--reinstall-package={path.name}" for path in (ROOT / "packages").iterdir()]
    steps.append([str(place.uv), "pip", "install", "--python", str(python), *ours,
                  "--reinstall-package=vime-integration", *definition.dependencies(cell)])  # fmt: skip
    for command in steps:
        # From the matrix's folder: uv takes its settings from the pyproject.toml there.
        status, _ = run_logged(command, log, INSTALL_DEADLINE_S, dict(os.environ), FOLDER)
        if status != 0:
            return None, f"cannot be installed: {tail(log)}"
    return python, ""


def run_check(python: Path, cell: Cell, check: str, place: Place, refusal: Refusal | None = None) -> Record:
    """Run one check in an environment.

    Args:
        python: Its interpreter.
        cell: A cell of it.
        check: ``light``, ``megatron``, ``interface`` or a pipeline.
        place: Where.
        refusal: What the check is expected to be refused by, if anything.

    Returns:
        What came of it.
    """
    log = place.folder / f"{cell.environment}.{check}.log"
    with tempfile.TemporaryDirectory(prefix="vime-matrix-") as text:
        answer = Path(text) / "answer.json"
        command = [str(python), str(FOLDER / "cli.py"), "check", check, "--answer", str(answer)]
        deadline = CHECK_DEADLINE_S.get(check, PIPELINE_DEADLINE_S)
        environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        status, seconds = run_logged(command, log, deadline, environ)
        if status is None:
            return record(cell, check, "failed", place, seconds, f"{check}: no end within {deadline:g} s")
        if not answer.is_file():
            return record(cell, check, "failed", place, seconds, f"{check}: ended with {status}: {tail(log)}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if found["passed"]:
        return record(cell, check, "passed", place, seconds, found["detail"])
    error = panel(log) or found["detail"]
    if refusal is not None and error.startswith(f"{refusal.error}:"):
        return record(cell, check, "refused", place, seconds, f"{error}. Why: {refusal.reason}")
    return record(cell, check, "failed", place, seconds, f"{check}: {error}")


def record(cell: Cell, check: str, outcome: Outcome, place: Place, seconds: float, detail: str) -> Record:
    """Make a record of today."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    # Without what differs from run to run: the same reason is one note of the table.
    flat = " ".join(ADDRESS.sub("an engine", detail.replace(str(ROOT), "")).split())[: 2 * TAIL]
    return Record(
        cell.environment, check, outcome, today, place.commit, place.machine.describe(), round(seconds, 1), flat
    )


def run_logged(
    command: Sequence[str], log: Path, deadline_s: float, environ: dict[str, str], folder: Path = ROOT
) -> tuple[int | None, float]:
    """Run a command in a session of its own, its output in a file; end the whole group at the deadline.

    Returns:
        Its exit status, None where the deadline passed, and the seconds it took.
    """
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - uv and our own checks
            list(command), stdout=stream, stderr=subprocess.STDOUT, env=environ, start_new_session=True, cwd=folder
        )
        status: int | None
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
    return status, time.monotonic() - began


def panel(log: Path) -> str:
    """Return the error that a run printed, as one line; nothing where it printed none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    title = [line.strip("╭╮─ ") for line in lines if line.startswith("╭─ ")][-1:]
    inside = [line.strip("│ ") for line in lines if line.startswith("│ ")]
    return ": ".join([*title, " ".join(inside)]) if title else ""


def tail(log: Path) -> str:
    """Return the end of a log as one line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " ".join(" ".join(lines[-6:])[-TAIL:].split())
