"""A small random model and a way to run the launcher as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
POLICY = EXAMPLES / "models" / "tiny-qwen3"
LAUNCHER = Path(sys.executable).with_name("vime-grpo")


class Launch:
    """One `vime-grpo train` process and what it leaves behind."""

    def __init__(self, *arguments: str, output: Path) -> None:
        self.output = output
        # The marker finds every process of the run, also those that the driver's death makes orphans.
        self.marker = f"run-{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "VIME_TEST_MARKER": self.marker}
        with output.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(LAUNCHER), "train", *arguments], stdout=stream, stderr=subprocess.STDOUT, env=environment
            )

    def wait(self, deadline_s: float) -> int:
        return self.process.wait(deadline_s)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("VIME_TEST_MARKER") == self.marker:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def until_gone(self, deadline_s: float) -> list[str]:
        """Wait until no process of the run is left; return those that are."""
        end = time.monotonic() + deadline_s
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return [" ".join(process.cmdline())[:120] for process in left if process.is_running()]

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()

    def until_step(self, metrics: Path, step: int, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with {self.process.returncode} before step {step}:\n{self.text()}")
            if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
                return
            time.sleep(0.1)
        pytest.fail(f"no step {step} within {deadline_s} s:\n{self.text()}")


def rows(metrics: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "vime" in path.name}
