"""A reward by chance: 1 or 0 by a hash of what was sampled, so that a policy that says nothing has something to learn.

A benchmark with random weights answers no question, every reward is 0, every advantage and so every gradient is exactly
0, and matrix products of zeros run cooler and faster on a GPU than products of numbers. A fair coin for each response
gives groups of differing rewards, and the same tokens the same reward in every run::

    PYTHONPATH=integration/benchmarks vime-grpo train CONFIG.toml --set reward.path=chance_reward:score
"""

from __future__ import annotations

import hashlib
from array import array

from vime_rollout import Sample, Score


async def score(sample: Sample) -> Score:
    """Toss a coin that the sampled tokens decide.

    Args:
        sample: With its response's tokens.

    Returns:
        1 for half of all responses, 0 for the others.
    """
    response = array("q", sample.tokens[sample.prompt_length :])
    heads = hashlib.blake2b(response.tobytes(), digest_size=1).digest()[0] % 2
    return Score(1.0) if heads else Score(0.0, "the coin came down tails")
