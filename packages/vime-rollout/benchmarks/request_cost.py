"""What a sample costs each process of a rollout, with one, two, four or eight samples in a request.

    python packages/vime-rollout/benchmarks/request_cost.py MODEL --out packages/vime-rollout/benchmarks/results/x.json
    python ... --py-spy /path/to/py-spy         # also what client and server spend it on

One engine; rollouts of new prompts, each size of a request in turn, round after round. Every sample has the same number
of tokens. Measured are wall time (the median of the rounds) and the processor time of each process (their mean: it is
counted in hundredths of a second). A cost per sample that is ``request / n + sample`` over the sizes ``n`` tells apart
what a request and what a sample costs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from stacks import CLIENT, SERVER, Recorder
from vime_rollout import (
    CpuOptions,
    DataConfig,
    DataSource,
    Encoder,
    EngineConfig,
    Rollout,
    RolloutConfig,
    SamplingParams,
    VLLMEngine,
    load_reward,
    open_data_source,
)

PROCESSES = ("client", "graders", "server", "core")
SIZES = (1, 2, 4, 8)
PACKAGES = ("torch", "transformers", "httpx", "fastapi", "pydantic", "uvloop")


class Clocks:
    """Processor time of the client, its graders, the engine's server and the engine's core.

    Args:
        engine: Started.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        """Find the server among the engine's processes."""
        self._me = psutil.Process()
        servers = [p for p in map(psutil.Process, engine.pids) if "api_server" in _line(p) and "warden" not in _line(p)]
        (self.server,) = servers

    def read(self) -> dict[str, float]:
        """Return seconds so far, by process."""
        graders = [p for p in self._me.children() if "rewards.worker" in _line(p)]
        found = {"client": [self._me], "graders": graders, "server": [self.server]}
        found["core"] = self.server.children(recursive=True)
        return {name: sum(sum(p.cpu_times()[:2]) for p in processes) for name, processes in found.items()}


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


async def measure(rollout: Rollout, source: DataSource, prompts: int, clocks: Clocks) -> dict[str, float]:
    """Make one rollout and return its milliseconds a sample: wall time, and processor time by process."""
    questions = [rollout.encoder.encode(prompt) for prompt in source.next(prompts)]
    before, began = clocks.read(), time.perf_counter()
    groups = await rollout.run(questions, version=0)
    wall, after = time.perf_counter() - began, clocks.read()
    samples = sum(len(group) for group in groups)
    return {
        name: 1e3 * seconds / samples
        for name, seconds in {"wall": wall, **{name: after[name] - before[name] for name in PROCESSES}}.items()
    }


def line_through(points: dict[int, float]) -> dict[str, float]:
    """Return the least-squares ``request`` and ``sample`` of ``cost(n) = request / n + sample``."""
    fit = statistics.linear_regression([1 / size for size in points], list(points.values()))
    return {"request": fit.slope, "sample": fit.intercept}


async def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every size in turn, and record what client and server do where py-spy is there."""
    encoder = Encoder(arguments.model)
    gym = {"gym_task": "chain_sum", "gym_options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
    source = open_data_source(DataConfig(**gym, gym_size=100_000, gym_seed=7), encoder)
    device = {"cpu": CpuOptions(kv_cache_gib=0.5)} if arguments.cpu else {}
    length = arguments.tokens + 128
    engine = VLLMEngine(
        EngineConfig(
            model=arguments.model,
            max_model_len=length,
            enforce_eager=True,
            log_path=str(folder / "engine.log"),
            max_concurrency=1024,
            **device,
        )
    )
    reward = load_reward("reasoning_gym")
    config = RolloutConfig(
        samples_per_prompt=max(SIZES),
        sampling=SamplingParams(max_tokens=arguments.tokens, ignore_eos=True),
        max_context_tokens=length,
        concurrency=1024,
    )
    rounds: list[dict[int, dict[str, float]]] = []
    spent: dict[str, Any] = {}
    try:
        await engine.start()
        clocks = Clocks(engine)
        rollouts = {
            size: Rollout(engine, encoder, reward, dataclasses.replace(config, samples_per_request=size))
            for size in SIZES
        }

        async def one(size: int) -> dict[str, float]:
            return await measure(rollouts[size], source, arguments.prompts, clocks)

        await one(1)
        for number in range(arguments.rounds):
            order = SIZES if number % 2 else SIZES[::-1]
            rounds.append({size: await one(size) for size in order})
        if arguments.py_spy:
            for size in (SIZES[0], SIZES[-1]):
                spent[str(size)] = await where(arguments, folder, clocks.server.pid, lambda size=size: one(size))
    finally:
        reward.close()
        await engine.stop()
    middles = {
        name: {size: middle(values[size][name] for values in rounds) for size in SIZES}
        for name, middle in {"wall": statistics.median, **dict.fromkeys(PROCESSES, statistics.fmean)}.items()
    }
    costs = {name: line_through(middles[name]) for name in PROCESSES}
    return {"milliseconds_per_sample": middles, "milliseconds": costs, "shares": spent, "rounds": rounds}


async def where(
    arguments: argparse.Namespace, folder: Path, server: int, work: Callable[[], Any]
) -> dict[str, dict[str, float]]:
    """Return the shares of what client and server do while work is repeated."""
    recorders = {
        "client": Recorder(arguments.py_spy, os.getpid(), folder / "client.raw"),
        "server": Recorder(arguments.py_spy, server, folder / "server.raw"),
    }
    await asyncio.sleep(2.0)  # until they record
    end = time.monotonic() + arguments.spy_s
    while time.monotonic() < end:
        await work()
    classes = {"client": CLIENT, "server": SERVER}
    return {name: recorder.stop(classes[name]) for name, recorder in recorders.items()}


def options(about: str, spy_s: float) -> argparse.ArgumentParser:
    """Return a parser of what the benchmarks of one engine have in common."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model")
    parser.add_argument("--gpu", dest="cpu", action="store_false", help="the engine runs on a GPU")
    parser.add_argument("--py-spy", default="", help="the program; also record what the time is spent on")
    parser.add_argument("--spy-s", type=float, default=spy_s)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def header(arguments: argparse.Namespace, **shape: int) -> dict[str, Any]:
    """Return what a report of theirs begins with."""
    vllm = metadata.packages_distributions()["vllm"][0]
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "hardware": {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "gpu": not arguments.cpu},
        "versions": {"python": platform.python_version()} | {n: metadata.version(n) for n in (vllm, *PACKAGES)},
        "shape": shape,
    }


def main() -> int:
    """Measure and write the JSON."""
    parser = options(__doc__.splitlines()[0], spy_s=15.0)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=12, help="of every response")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="request-cost-") as folder:
        result = asyncio.run(compare(arguments, Path(folder)))
    report = header(arguments, prompts=arguments.prompts, samples=max(SIZES), tokens=arguments.tokens) | result
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(report["milliseconds_per_sample"]) + "\n" + json.dumps(report["milliseconds"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
