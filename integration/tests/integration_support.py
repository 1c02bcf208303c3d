"""A small random model and a way to run the launcher as a user does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from vime_rollout.engine import temporary_variables

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
POLICY = EXAMPLES / "models" / "tiny-qwen3"
LAUNCHER = Path(sys.executable).with_name("vime-grpo")

CONFIG = """
[model]
path = "@POLICY"
[data]
kind = "reasoning_gym"
task = "chain_sum"
size = 400
seed = 3
task_config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
[rollout]
batch_size = 32
samples_per_prompt = 8
max_response_tokens = 8
max_context_tokens = 96
[engine]
dtype = "float32"
enforce_eager = true
kv_cache_gib = 0.25
[reward]
name = "reasoning_gym"
[algorithm]
[trainer]
dtype = "float32"
learning_rate = 5e-4
adam_beta2 = 0.95
weight_decay = 0.0
max_tokens_per_microbatch = 4096
[sync]
[pipeline]
steps = @STEPS
run_dir = "run"
[guards]
logprob_difference = 1e-3
[checkpoint]
every = @EVERY
[tracking]
console = "plain"
"""


QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


def pretend_8b(folder: Path) -> Path:
    """Make a folder that is Qwen3-8B to whoever reads its config.json."""
    shutil.copytree(POLICY, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **QWEN3_8B}))
    return folder


def config_file(folder: Path, *, steps: int, save_every: int) -> Path:
    """Write a configuration that learns fast on a CPU; its run folder is `run` beside it."""
    path = folder / "run.toml"
    text = CONFIG.replace("@POLICY", str(POLICY)).replace("@STEPS", str(steps)).replace("@EVERY", str(save_every))
    path.write_text(text)
    return path


OWN = """
[data]
kind = "custom"
source = "own_code:Sums"
options = { seed = 3, size = 400 }
[evaluation]
every = 2
kind = "custom"
source = "own_code:Sums"
options = { seed = 99, size = 8 }
size = 8
samples_per_prompt = 2
temperature = 0.7
pass_k = [1, 2]
[reward]
path = "own_code:equals"
options = { right = 1.0 }
[rollout]
generate = "own_code:noted"
generate_options = { note = "of one's own" }
filter = "own_code:has_answers"
filter_options = { least = 1 }
"""


def own_config_file(folder: Path, *, steps: int, save_every: int) -> Path:
    """Write the same configuration with code of one's own (`own_code`) at every point that takes it."""
    path = config_file(folder, steps=steps, save_every=save_every)
    sections = dict(re.findall(r"(?m)^(\[\w+\])\n((?:[^\[].*\n)*)", path.read_text()))
    own = dict(re.findall(r"(?m)^(\[\w+\])\n((?:[^\[].*\n)*)", OWN))
    own["[rollout]"] = sections["[rollout]"] + own["[rollout]"]
    path.write_text("".join(f"{name}\n{keys}" for name, keys in (sections | own).items()))
    return path


class SomebodyElse:
    """Keeps engines in a process of its own; see `somebody_else`."""

    def __init__(self, folder: Path, count: int) -> None:
        command = [
            sys.executable,
            str(Path(__file__).with_name("somebody_else.py")),
            str(POLICY),
            str(folder),
            str(count),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> list[Any]:
        """Return what the process says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engines ended: {self._process.wait(60)}"
        return json.loads(line)

    def engines(self) -> list[tuple[int, int]]:
        """Return the version and the number of answered requests of each engine, after it has made a token."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [(version, answered) for version, answered in self.says()]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()


class Launch:
    """One `vime-grpo train` process and what it leaves behind."""

    def __init__(self, *arguments: str, output: Path) -> None:
        self.output = output
        # The marker finds every process of the run, also those that the driver's death makes orphans, except those that
        # give themselves a title: it is written over their environment. They are remembered while the driver lives.
        self.titled: dict[int, psutil.Process] = {}
        self.marker = f"run-{os.getpid()}-{time.monotonic_ns()}"
        # As a user does who has code of their own beside the configuration.
        own = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # pytest's own have too long a path for vLLM's sockets
        environment = {**os.environ, "VIME_TEST_MARKER": self.marker, "PYTHONPATH": own}
        environment |= temporary_variables(self.temporary, os.environ)
        with output.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(LAUNCHER), "train", *arguments], stdout=stream, stderr=subprocess.STDOUT, env=environment
            )

    def wait(self, deadline_s: float) -> int:
        """Wait for the driver's end, which takes the processes that have a title out of sight."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None and time.monotonic() < end:
            self.remember()
            time.sleep(0.5)
        return self.process.wait(max(0.0, end - time.monotonic()))

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def remember(self) -> None:
        """Keep what is below the driver now, for the time when it is below it no more."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:  # it is gone
            return
        self.titled |= {process.pid: process for process in below}

    def processes(self) -> list[psutil.Process]:
        self.remember()
        found = []
        for process in psutil.process_iter():
            try:
                known = self.titled.get(process.pid) == process
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and (known or process.environ().get("VIME_TEST_MARKER") == self.marker):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def until_gone(self, deadline_s: float) -> list[str]:
        """Wait until no process of the run is left; return those that are, and temporary files."""
        end = time.monotonic() + deadline_s
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        files = [str(path) for path in self.temporary.iterdir()]
        return [" ".join(process.cmdline())[:120] for process in left if process.is_running()] + files

    def kill_an_engine(self) -> None:
        """Kill the server process of one engine, as a fault would: nobody is told."""
        servers = [p for p in self.processes() if "vllm.entrypoints.openai.api_server" in " ".join(p.cmdline())]
        assert servers, f"an engine is a process of the run\n{self.text()}"
        parents = {server.ppid() for server in servers}  # keeper and warden have the server's command in their own
        next(server for server in servers if server.pid not in parents).kill()

    def kill_a_trainer(self) -> None:
        """Kill the process of the last trainer rank."""
        ranks = [p for p in self.processes() if "TrainerActor" in " ".join(p.cmdline())]
        assert ranks, f"a trainer rank is a process of the run\n{self.text()}"
        max(ranks, key=lambda process: process.pid).kill()

    def until_phase(self, log: Path, step: int, phase: str, deadline_s: float) -> None:
        """Wait until a phase of a step begins, as the driver's log says."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if log.exists() and f"step {step}: {phase}" in log.read_text(errors="replace"):
                self.remember()
                return
            if self.process.poll() is not None:
                pytest.fail(
                    f"the run ended with {self.process.returncode} before {phase} of step {step}:\n{self.text()}"
                )
            time.sleep(0.02)
        pytest.fail(f"no {phase} of step {step} within {deadline_s} s:\n{self.text()}")

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def until_step(self, metrics: Path, step: int, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with {self.process.returncode} before step {step}:\n{self.text()}")
            if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
                self.remember()
                return
            time.sleep(0.1)
        pytest.fail(f"no step {step} within {deadline_s} s:\n{self.text()}")


def rows(metrics: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def orphaned_memory() -> set[str]:
    """Return the shared-memory segments whose maker is gone; a name is vime-<namespace>-<pid>-<start>-<secret>."""
    segments = (path.name for path in Path("/dev/shm").glob("vime-*"))
    return {name for name in segments if not psutil.pid_exists(int(name.split("-")[-3]))}
