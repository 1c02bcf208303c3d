"""What ``token_cost.py`` tries: one change of vLLM's server or of the request each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Programs that every Python of an engine begins with, to try what vLLM has no setting for.
BEGINNINGS = {
    "rare": "import gc\ngc.set_threshold(100_000, 50, 1000)\n",
    # vLLM caches its environment variables in the core when that has started, but in the server never.
    "cached": """import sys, threading, time
def cache():
    while "vllm.v1.engine.output_processor" not in sys.modules:
        time.sleep(0.5)
    time.sleep(5)
    sys.modules["vllm.envs"].enable_envs_cache()
threading.Thread(target=cache, daemon=True).start()
""",
}


@dataclass(frozen=True)
class Setting:
    """One change.

    Args:
        arguments: Of the server.
        environment: Of the server.
        sampling: Fields of the request's sampling parameters.
        one_each: Every sample is a request of its own.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    one_each: bool = False

    @property
    def needs_engine(self) -> bool:
        """Whether the engine must be started with it."""
        return bool(self.arguments or self.environment)


#: What the others are held against: requests as they were before one of these was adopted.
BASE = Setting(sampling={"flat_logprobs": False})
SETTINGS = {
    "flat_logprobs": Setting(sampling={"flat_logprobs": True}),
    "no logprobs": Setting(sampling={"logprobs": None}),
    "no seed": Setting(sampling={"seed": None}),
    "a request a sample": Setting(one_each=True),
    "--disable-log-stats": Setting(("--disable-log-stats",)),
    "--stream-interval 16": Setting(("--stream-interval", "16")),
    "--no-enable-prefix-caching": Setting(("--no-enable-prefix-caching",)),
    "--max-num-batched-tokens 16384": Setting(("--max-num-batched-tokens", "16384")),
    "--skip-tokenizer-init": Setting(("--skip-tokenizer-init",)),
    "--return-tokens-as-token-ids": Setting(("--return-tokens-as-token-ids",)),
    "(nothing changed)": Setting(environment={"VIME_BENCHMARK": "1"}),  # how far two engines alike are apart
    "(garbage collected rarely)": Setting(environment={"PYTHONPATH": "{folder}/rare"}),
    "(environment variables cached)": Setting(environment={"PYTHONPATH": "{folder}/cached"}),
}
