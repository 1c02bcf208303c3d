"""What the pipeline does for each sample and token in the event loop's thread, beside asking the engine directly.

    python packages/vime-rollout/benchmarks/tail_cost.py MODEL --out packages/vime-rollout/benchmarks/results/x.json
    python ... --before CHECKOUT        # another checkout, in turn with this one: a git worktree of a commit

The engine is a script: bodies as vLLM 0.32 sends them, made beforehand, are all there at once, as at the end of a step
of equally long responses. *Directly* they are decoded, checked and thrown away; through the pipeline they also become
scored samples (``Rollout``) and the rows of a batch (``make_batch`` of vime-integration). Told are the least processor
time of the rounds (others are at work on the machine) without the garbage collector's, and the mean of that, because a
full collection comes once in a few rounds. *Own* is what rollout and batch take beyond direct, with and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
from tail_parts import PARTS, Script, Watch, body_of
from vime_grpo import load_config
from vime_integration.batches import make_batch
from vime_integration.translate import data_config, rollout_config
from vime_rollout import Encoder, EnginePool, GenerateRequest, RemoteEngine, Rollout, load_reward, open_data_source

#: Requests a round, samples a request, tokens a sample.
SHAPES = {"many short": (32, 16, 8), "few long": (16, 8, 512)}
SOURCES = ("packages/vime-rollout/src", "packages/vime-grpo/src", "integration/src")
CONFIG = Path(__file__).parents[3] / "integration/examples/gpu_smollm2.toml"


async def measure(model: str, shape: tuple[int, int, int], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a round by part: the least without collections, and the mean of those."""
    requests, samples, tokens = shape
    sizes = {"batch_size": requests, "samples_per_prompt": samples, "max_response_tokens": tokens}
    settings = {"model.path": json.dumps(model)} | {f"rollout.{name}": size for name, size in sizes.items()}
    settings["rollout.max_context_tokens"] = tokens + 128
    config = load_config(CONFIG, [f"{name}={value}" for name, value in settings.items()])
    encoder = Encoder(model)
    source = open_data_source(data_config(config), encoder)
    engine = RemoteEngine("http://engine", name="engine-0")
    client: Any = engine._client
    client._session()
    bodies = [body_of(seed, samples, tokens) for seed in range(requests)]
    client._http = httpx.AsyncClient(base_url="http://engine", transport=Script(bodies))
    await engine.connect()
    reward = load_reward(config.reward.name)
    rollout, watch = Rollout(EnginePool([engine]), encoder, reward, rollout_config(config)), Watch()

    async def direct(questions: list[Any]) -> None:
        asked = [GenerateRequest(p.tokens, rollout.config.sampling, rollout.seed_of(p, 0)) for p in questions]
        await asyncio.gather(*(engine.generate_many(one, samples) for one in asked))

    async def batch(groups: list[Any]) -> None:
        make_batch([sample for group in groups for sample in group], config, 0)

    for _ in range(rounds + 2):
        questions = [encoder.encode(prompt) for prompt in source.next(requests)]
        await watch.timed("direct", direct(questions))
        await watch.timed("batch", batch(await watch.timed("rollout", rollout.run(questions, version=0))))
    reward.close()
    gc.callbacks.remove(watch._hear)
    return {
        name: {"least": min(watch.spent[name][2:]), "collecting": statistics.fmean(watch.collecting[name][2:])}
        for name in PARTS
    }


def child(tree: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of a checkout, made in a process that imports from it."""
    paths = os.pathsep.join(str(tree / source) for source in SOURCES)
    command = [sys.executable, __file__, arguments.model, "--rounds", str(arguments.rounds), "--here"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True, timeout=600
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def summary(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the turns as one, with what is the pipeline's own for each sample and token, in microseconds."""
    result: dict[str, dict[str, float]] = {}
    for shape, (requests, samples, tokens) in SHAPES.items():
        least = {name: min(turn[shape][name]["least"] for turn in turns) for name in PARTS}
        collecting = {name: statistics.fmean(turn[shape][name]["collecting"] for turn in turns) for name in PARTS}
        plain, more = (part["rollout"] + part["batch"] - part["direct"] for part in (least, collecting))
        values = least | {f"{name}, collecting": value for name, value in collecting.items()}
        for kind, own in (("without collections", plain), ("with", plain + more)):
            values[f"own, {kind}, us a sample"] = 1e3 * own / (requests * samples)
            values[f"own, {kind}, us a token"] = 1e3 * own / (requests * samples * tokens)
        result[shape] = {name: round(value, 2) for name, value in values.items()}
    return result


def main() -> int:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder with a tokenizer of at least 40,000 tokens")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="measure what this process imports, and write to stdout")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.here:
        every = {name: asyncio.run(measure(arguments.model, shape, arguments.rounds)) for name, shape in SHAPES.items()}
        sys.stdout.write(json.dumps(every))
        return 0
    trees = {"before": arguments.before, "after": Path(__file__).parents[3]}
    trees = {name: tree for name, tree in trees.items() if tree is not None}
    turns: dict[str, list[Any]] = {name: [] for name in trees}
    for _ in range(arguments.turns):
        for name, tree in trees.items():
            turns[name].append(child(tree, arguments))
    report = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "hardware": {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("httpx", "tokenizers", "torch", "transformers")},
        "shapes (requests, samples, tokens)": SHAPES,
        "milliseconds a round": {name: summary(values) for name, values in turns.items()},
    }
    text = json.dumps(report, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
