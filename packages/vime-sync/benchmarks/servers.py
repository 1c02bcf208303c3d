"""vLLM servers as child processes, on a chosen device, with our plugin found through a folder on PYTHONPATH.

A server starts when it is made, so several can start side by side; `Server.wait` (or entering it as a context) waits
until it answers. The memory of its KV cache is given in bytes: vLLM then does not measure the device's free memory,
which would mean nothing while other servers start on it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch
from vime_devices import child_environment, detect_platform, visible_devices
from vime_sync import engine_environment

_GRACE_S = 20.0
#: 29 000 tokens of the Qwen3-8B shape.
KV_CACHE_BYTES = 4 << 30
#: What a root cause looks like in vLLM's log: the first exception of the engine's own process.
_CAUSE = re.compile(r"^\(EngineCore[^)]*\).*?\b(\w+(?:\.\w+)*(?:Error|Exception): .*)$")


def plugin_folder(folder: Path) -> Path:
    """Make the entry points of vime-sync visible where the package is on PYTHONPATH but not installed.

    Args:
        folder: Where to write a ``*.dist-info``.

    Returns:
        The folder, to be put on PYTHONPATH.
    """
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    info = folder / f"vime_sync-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vime-sync\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


class Server:
    """One vLLM server. Use as a context manager: it never outlives the block."""

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        *,
        work: Path,
        device: int = 0,
        dtype: str = "bfloat16",
        plugin: bool = True,
        deadline_s: float = 240.0,
    ) -> None:
        """Start it.

        Args:
            model: The HF folder.
            arguments: More command-line arguments.
            work: Folder for the log.
            device: Which visible device it owns.
            dtype: Its dtype.
            plugin: Load vime-sync's plugin.
            deadline_s: Seconds until it must answer.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.model, self.deadline_s = f"http://127.0.0.1:{port}", str(model), deadline_s
        self.log = work / f"server-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port"]
        command += [str(port), "--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "2048"]
        command += ["--max-num-seqs", "64", "--max-num-batched-tokens", "4096", *_memory(), *arguments]
        self._client = httpx.Client(timeout=300, limits=httpx.Limits(max_connections=None))
        self._started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=_environment(device, work, plugin=plugin),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> Server:
        """Wait until it answers.

        Raises:
            RuntimeError: If it ended, or the deadline passed; with the cause that its log names.
        """
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).is_success:
                    self.start_seconds = time.perf_counter() - self._started
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        code = self.process.poll()
        self.stop()
        what = f"no server after {self.deadline_s:.0f} s" if code is None else f"the server ended with {code}"
        raise RuntimeError(f"{what}: {self.cause() or self.tail()}")

    def __enter__(self) -> Server:
        """Wait until it answers."""
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    def cause(self) -> str:
        """The first exceptions that the engine's process logged; empty if there is none."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [match[1] for line in lines if (match := _CAUSE.match(line))]
        return " | ".join(dict.fromkeys(found[:6]))[:1500]

    def tail(self, size: int = 3500) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:]

    def grep(self, text: str) -> list[str]:
        """Lines of its log that contain a text."""
        return [line.strip()[-200:] for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def stop(self) -> None:
        """End it and all that it started; again is allowed."""
        self._client.close()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(_GRACE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def generate(self, tokens: int = 12, prompt: int = 30) -> dict[str, Any]:
        """Greedy tokens and their logprobs."""
        body = {
            "model": self.model,
            "prompt": list(range(10, 10 + prompt)),
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = self._client.post(f"{self.url}/v1/completions", json=body)
        response.raise_for_status()
        choice: dict[str, Any] = response.json()["choices"][0]
        return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def _memory() -> list[str]:
    """How a GPU server's memory is limited (a CPU server's by its environment)."""
    if not torch.cuda.is_available():
        return []
    return ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]


def _environment(device: int, work: Path, *, plugin: bool) -> dict[str, str]:
    platform = detect_platform()
    seen = visible_devices(platform, os.environ)
    base = child_environment(platform, own=seen[device : device + 1], node=seen, base=os.environ).env
    base |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if not seen:
        base |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        base = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"} | base
    if not plugin:  # vLLM's own ipc sends pickles
        base |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    else:
        path = [str(plugin_folder(work / "plugin")), base.get("PYTHONPATH", "")]
        base |= engine_environment() | {"PYTHONPATH": os.pathsep.join(p for p in path if p)}
    return base
