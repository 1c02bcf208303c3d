"""Parts of ``tail_cost.py``: a server without a wire that answers at once as vLLM 0.32 does, and a clock."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import threading
import time
from collections.abc import Coroutine
from typing import Any

import httpx

PARTS = ("direct", "rollout", "batch")


def body_of(seed: int, samples: int, tokens: int) -> bytes:
    """Return an answer of vLLM 0.32 with so many samples of so many tokens."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    choices: list[dict[str, Any]] = []
    for index in range(samples):
        own = [{"token_id": draw.randrange(100, 40000), "logprob": -draw.random(), "rank": 1} for _ in range(tokens)]
        choice = {"index": index, "finish_reason": "length", "stop_reason": None, "routed_experts": None}
        choice["token_ids"] = [entry["token_id"] for entry in own]
        choice["logprobs"] = {"content": [entry | {"top_logprobs": [entry]} for entry in own]}
        choices.append(choice | {"weight_versions": [{"version": "0", "start": 0, "end": tokens}]})
    return json.dumps({"request_id": f"generate-tokens-{seed}", "choices": choices}, separators=(",", ":")).encode()


class Script(httpx.AsyncBaseTransport):
    """A server without a wire: generations get one body after the other, control calls a fresh server's answers."""

    def __init__(self, bodies: list[bytes]) -> None:
        """Begin with the first body."""
        self._bodies = itertools.cycle(bodies)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer in the loop's next turn."""
        await asyncio.sleep(0)
        if request.url.path.endswith("/generate"):
            return httpx.Response(200, content=next(self._bodies))
        return httpx.Response(200, json={"version": "0.32.0", "weight_version": "0"})


class Watch:
    """Milliseconds of this thread's processor time by part, and those of the garbage collector among them."""

    def __init__(self) -> None:
        """Begin to listen to the collector."""
        self.spent: dict[str, list[float]] = {name: [] for name in PARTS}
        self.collecting: dict[str, list[float]] = {name: [] for name in PARTS}
        self._thread, self._sum, self._began = threading.get_ident(), 0.0, 0.0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread:
            now = time.thread_time()
            self._sum += 0.0 if phase == "start" else now - self._began
            self._began = now

    async def timed(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for work and note what it took."""
        before, began = self._sum, time.thread_time()
        result = await work
        collecting = self._sum - before
        self.spent[name].append(1e3 * (time.thread_time() - began - collecting))
        self.collecting[name].append(1e3 * collecting)
        return result
