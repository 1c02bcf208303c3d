"""Engines that somebody else starts, and who keeps them: a process of its own, beside any run.

    python somebody_else.py MODEL FOLDER COUNT

Prints a JSON line with the addresses once all engines have answered. For every line that it is given it has each engine
make a token, and prints one line with their versions and how many requests they have answered. Ends them when its input
ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx
from vime_rollout import CpuOptions, EngineConfig, VLLMEngine
from vime_sync import engine_arguments, engine_environment


async def keep(model: str, folder: str, count: int) -> None:
    engines = [
        VLLMEngine(
            EngineConfig(
                model=model,
                name=f"somebodys-{number}",
                dtype="float32",
                max_model_len=96,
                enforce_eager=True,
                cpu=CpuOptions(kv_cache_gib=0.25, threads=1),
                arguments=tuple(engine_arguments(weights="dummy")),
                environment=engine_environment(),
                log_path=f"{folder}/somebodys-{number}.log",
            )
        )
        for number in range(count)
    ]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        say([engine.url for engine in engines])
        while await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*(engine.probe(60) for engine in engines))
            say([(await engine.read_version(), answered(engine.url)) for engine in engines])
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def answered(url: str) -> int:
    """Return how many requests an engine has finished, as it counts them itself."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{")))


def say(words: list[object]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(keep(sys.argv[1], sys.argv[2], int(sys.argv[3])))
