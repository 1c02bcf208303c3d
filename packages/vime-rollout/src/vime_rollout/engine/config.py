"""How to start one vLLM server: a frozen value that turns into a command line and an environment.

The package adds what token-in, token-out rollouts need, and nothing about any backend: weight transfer arguments,
device masks and the like come in through ``arguments`` and ``environment`` from those who own them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vime_rollout.engine.window import NEWEST_DIALECT, Dialect
from vime_rollout.errors import EngineStartError


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOptions:
    """Bounds for an engine on a CPU, where it would take all cores and half of the memory otherwise.

    Args:
        kv_cache_gib: Memory for the KV cache, GiB; vLLM would take a share of the host's memory.
        threads: OpenMP threads of a worker.
        fast_start: Run worker and engine core in one process and compile nothing: minutes less for small models, some
            speed less for large ones.
    """

    kv_cache_gib: float = 1.0
    threads: int = 1
    fast_start: bool = True

    def arguments(self) -> list[str]:
        """Return the command-line arguments that set these bounds."""
        # A seeded request whose prompt is prefilled in parts ends vLLM 0.32's engine on a CPU: it rewinds the request's
        # generator by an offset, which CPU generators do not have. Whole prompts need no rewinding.
        whole_prompts = "--no-enable-chunked-prefill"
        return ["--kv-cache-memory-bytes", str(int(self.kv_cache_gib * 2**30)), whole_prompts]

    def environment(self) -> dict[str, str | None]:
        """Return the environment variables that set these bounds."""
        variables: dict[str, str | None] = {
            "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB only, and it would win over the argument
            # Binding threads to cores would put two engines of one host onto the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
        }
        if self.fast_start:
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine.

    Args:
        model: Local model folder (Hugging Face layout).
        name: Name in logs and errors; unique among the engines of a run.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        dtype: vLLM's dtype; ``float32`` for exact comparisons. ``auto`` makes bfloat16 of a float32 model.
        max_model_len: Longest prompt and response together, tokens; ``None`` takes the model's.
        tensor_parallel_size: GPUs of the engine.
        seed: Seed of the engine (requests without their own).
        gpu_memory_utilization: Share of a GPU's memory; ``None`` takes vLLM's default.
        enforce_eager: No CUDA/HIP graphs, no compilation: starts fast, runs slower.
        enable_sleep_mode: Make ``sleep`` give memory back (GPU engines).
        load_format: vLLM's load format (``"dummy"`` for weights that are sent later); ``None`` takes its default.
        cpu: Bounds for an engine on a CPU; ``None`` on a GPU.
        arguments: Further command-line arguments; they win over those above.
        environment: Further environment variables; they win over all; ``None`` as a value removes the variable.
        log_path: Where the server's output goes.
        initial_version: Weight version of what the model folder holds.
        max_concurrency: Most requests in the engine at a time; more wait.
        start_deadline_s: Seconds from start to ready.
        request_deadline_s: Seconds for one response in the engine, retries included.
        control_deadline_s: Seconds for a control call (pause, sleep, health, ...).
        retries: Further attempts after a failure that may pass.
        stop_grace_s: Seconds between the polite and the forced end of the process tree.
        python: Interpreter to run the server with.
        module: The server's module.
    """

    model: str
    name: str = "engine-0"
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    load_format: str | None = None
    cpu: CpuOptions | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    log_path: str = "engine-0.log"
    initial_version: int = 0
    max_concurrency: int = 256
    start_deadline_s: float = 600.0
    request_deadline_s: float = 600.0
    control_deadline_s: float = 120.0
    retries: int = 2
    stop_grace_s: float = 10.0
    python: str = sys.executable
    module: str = "vllm.entrypoints.openai.api_server"

    def command(self, port: int, dialect: Dialect = NEWEST_DIALECT) -> list[str]:
        """Return the command line of a server.

        Args:
            port: To listen on.
            dialect: Of the vLLM that it starts: an option that a release does not know would end it.
        """
        options: dict[str, str | None] = {
            "--model": self.model,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": str(port),
            "--dtype": self.dtype,
            "--seed": str(self.seed),
            "--tensor-parallel-size": str(self.tensor_parallel_size),
            "--max-model-len": None if self.max_model_len is None else str(self.max_model_len),
            "--gpu-memory-utilization": _text(self.gpu_memory_utilization),
            "--load-format": self.load_format,
            "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled, temperature included
        }
        flags = ["--disable-uvicorn-access-log", *(["--enable-scale-out"] if dialect.scale_out_option else [])]
        flags += ["--enforce-eager"] if self.enforce_eager else []
        flags += ["--enable-sleep-mode"] if self.enable_sleep_mode else []
        pairs = [part for name, value in options.items() if value is not None for part in (name, value)]
        flags += [] if self.cpu is None else self.cpu.arguments()
        return [self.python, "-m", self.module, *pairs, *flags, *self.arguments]

    def child_environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the server's whole environment.

        Args:
            base: What to start from; ``None`` takes this process's environment.
        """
        merged: dict[str, str | None] = dict(os.environ if base is None else base)
        merged |= {
            "VLLM_SERVER_DEV_MODE": "1",  # the pause, resume, sleep and weight routes
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "0",  # a server without its engine must end, not linger
            "PYTHONUNBUFFERED": "1",  # the log's last lines matter most
        }
        merged |= {} if self.cpu is None else self.cpu.environment()
        merged |= self.environment
        return {name: value for name, value in merged.items() if value is not None}

    def check_model(self) -> None:
        """Check, before anything is started, that the model folder can be one.

        Raises:
            EngineStartError: When the folder or its ``config.json`` is missing or names no architecture.
        """
        where = f"engine {self.name}, model {self.model}"
        path = Path(self.model) / "config.json"
        if not Path(self.model).is_dir():
            raise EngineStartError("model folder is missing", where=where, expected="a folder", fix="check model.path")
        try:
            config = json.loads(path.read_text())
            architectures = config["architectures"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineStartError(
                "model folder is not one",
                where=where,
                seen=f"{type(error).__name__}: {error}",
                expected="a config.json that names its architectures",
            ) from error
        if not architectures:
            raise EngineStartError("model folder names no architecture", where=where, seen=repr(architectures))


def _text(value: float | None) -> str | None:
    return None if value is None else str(value)
