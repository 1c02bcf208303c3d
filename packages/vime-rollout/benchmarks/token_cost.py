"""What a token costs vLLM's two host processes beside the model, and which setting of server or request changes that.

    python packages/vime-rollout/benchmarks/token_cost.py MODEL --out packages/vime-rollout/benchmarks/results/x.json
    python ... --py-spy /path/to/py-spy         # also what both processes spend it on
    python ... --only flat_logprobs             # this setting alone; the file keeps what it has of the others

One engine as it is, and beside it, one after another, engines with one setting changed each; or one field of the
request changed, sent to the first. Both answer the same requests in turn, round after round, and their processor time
is counted. So is whether the same tokens and logprobs came back: a setting that changes them is none to adopt. The
requests are sent as they are, by httpx: the client is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from request_cost import Clocks, header, options
from stacks import CORE_TOKENS, SERVER_TOKENS, Recorder
from token_settings import BASE, BEGINNINGS, SETTINGS, Setting
from vime_rollout import CpuOptions, EngineConfig, GenerateRequest, SamplingParams, VLLMEngine

PROCESSES = ("server", "core")


@dataclass(frozen=True)
class Driven:
    """An engine that is measured."""

    engine: VLLMEngine
    clocks: Clocks
    http: httpx.AsyncClient


async def started(arguments: argparse.Namespace, folder: Path, setting: Setting, number: int) -> Driven:
    """Start an engine with a setting and send it something."""
    length = arguments.tokens + arguments.prompt_tokens
    # Two engines stand side by side on one GPU.
    room = () if arguments.cpu else ("--kv-cache-memory-bytes", str(4 << 30))
    config = EngineConfig(
        model=arguments.model,
        name=f"engine-{number}",
        dtype="bfloat16",
        max_model_len=length,
        enforce_eager=arguments.cpu,
        gpu_memory_utilization=None if arguments.cpu else 0.3,
        cpu=CpuOptions(kv_cache_gib=0.5) if arguments.cpu else None,
        arguments=(*setting.arguments, *room),
        environment={name: str(value).format(folder=folder) for name, value in setting.environment.items()},
        log_path=str(folder / f"engine-{number}.log"),
    )
    engine = VLLMEngine(config)
    await engine.start()
    driven = Driven(engine, Clocks(engine), httpx.AsyncClient(base_url=engine.url, timeout=300, trust_env=False))
    await cost(arguments, driven, BASE, 10_000)
    return driven


async def cost(
    arguments: argparse.Namespace, driven: Driven, setting: Setting, number: int
) -> tuple[dict[str, float], list[Any]]:
    """Send the requests of a round and return the microseconds a token by process, and what came, in order."""
    draw = random.Random(number)  # noqa: S311 - token ids
    sampling = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    bodies = []
    for index in range(arguments.requests):
        ids = tuple(draw.randrange(3, 300) for _ in range(arguments.prompt_tokens))
        for one in range(arguments.samples if setting.one_each else 1):
            request = GenerateRequest(ids, sampling, seed=1000 * index + one)
            body = request.to_wire(1 if setting.one_each else arguments.samples)
            body["sampling_params"] |= {**BASE.sampling, **setting.sampling}
            bodies.append(body)
    before, began = driven.clocks.read(), time.perf_counter()
    answers = await asyncio.gather(*(driven.http.post("/inference/v1/generate", json=body) for body in bodies))
    wall, after = time.perf_counter() - began, driven.clocks.read()
    samples = []
    for answer in answers:
        for choice in sorted(answer.raise_for_status().json()["choices"], key=lambda choice: choice["index"]):
            entries = (choice["logprobs"] or {}).get("content") or []
            samples.append((choice["token_ids"], [entry["logprob"] for entry in entries]))
    tokens = sum(len(ids) for ids, _ in samples)
    spent = {"wall": wall} | {name: after[name] - before[name] for name in PROCESSES}
    return {name: 1e6 * seconds / tokens for name, seconds in spent.items()}, samples


async def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every setting beside the engine as it is."""
    for name, program in BEGINNINGS.items():
        (folder / name).mkdir()
        (folder / name / "sitecustomize.py").write_text(program, encoding="utf-8")
    base = await started(arguments, folder, BASE, 0)
    result: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    try:
        if arguments.py_spy:
            shares = await where(arguments, folder, base)
        for order, (name, setting) in enumerate(SETTINGS.items()):
            if arguments.only and name not in arguments.only:
                continue
            other = await started(arguments, folder, setting, order + 1) if setting.needs_engine else base
            try:
                result[name] = await beside(arguments, base, other, setting)
            finally:
                if other is not base:
                    await other.http.aclose()
                    await other.engine.stop()
            print(name, json.dumps(result[name]["percent"]), flush=True)
    finally:
        await base.http.aclose()
        await base.engine.stop()
    return {"settings": result, "shares": shares}


async def beside(arguments: argparse.Namespace, base: Driven, other: Driven, setting: Setting) -> dict[str, Any]:
    """Let both take turns, and return their costs, the change, and how many of the samples are the same."""
    costs: dict[str, list[dict[str, float]]] = {"base": [], "changed": []}
    same = total = 0
    for number in range(arguments.rounds):
        turns = [("base", base, BASE), ("changed", other, setting)]
        came = {}
        for name, driven, chosen in turns if number % 2 else reversed(turns):
            spent, came[name] = await cost(arguments, driven, chosen, number)
            costs[name].append(spent)
        for (ids, logprobs), (new_ids, new_logprobs) in zip(came["base"], came["changed"], strict=True):
            same += ids == new_ids and (not new_logprobs or logprobs == new_logprobs)
            total += 1
    means = {
        side: {name: statistics.fmean(spent[name] for spent in values) for name in values[0]}
        for side, values in costs.items()
    }
    percent, error = {}, {}
    for name in means["changed"]:
        ratios = [100 * b[name] / a[name] - 100 for a, b in zip(*costs.values(), strict=True)]
        percent[name] = statistics.fmean(ratios)
        error[name] = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return {"us_a_token": means, "percent": percent, "standard_error": error, "same_samples": same / total}


async def where(arguments: argparse.Namespace, folder: Path, base: Driven) -> dict[str, Any]:
    """Return the shares of what server and core do while the engine as it is answers."""
    (core,) = [
        child for child in base.clocks.server.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())
    ]
    pids = {"server": base.clocks.server.pid, "core": core.pid}
    recorders = {name: Recorder(arguments.py_spy, pid, folder / f"{name}.raw") for name, pid in pids.items()}
    await asyncio.sleep(2.0)  # until they record
    end, number = time.monotonic() + arguments.spy_s, 1000
    while time.monotonic() < end:
        await cost(arguments, base, BASE, number := number + 1)
    classes = {"server": SERVER_TOKENS, "core": CORE_TOKENS}
    return {name: recorder.stop(classes[name]) for name, recorder in recorders.items()}


def main() -> int:
    """Measure and write the JSON."""
    parser = options(__doc__.splitlines()[0], spy_s=20.0)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of every request")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of every sample")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", action="append", default=[], metavar="SETTING", help="measure these alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="token-cost-") as folder:
        result = asyncio.run(compare(arguments, Path(folder)))
    shape = {name: getattr(arguments, name) for name in ("requests", "samples", "tokens", "rounds")}
    report = header(arguments, **shape) | result
    if arguments.only and arguments.out.exists():
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))
        report["settings"] = earlier["settings"] | report["settings"]
        report["shares"] = report["shares"] or earlier["shares"]
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
