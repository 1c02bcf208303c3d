r"""Metrics of an evaluation: mean reward with its uncertainty, and pass@k.

pass@k is the probability that of k samples of a prompt at least one solves it. With n >= k samples of which c solve it,
:math:`1 - \binom{n-c}{k} / \binom{n}{k}` is an unbiased estimate (Evaluating Large Language Models Trained on Code,
arXiv:2107.03374); plugging the solved share into ``1 - (1 - c / n)^k`` is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from vime_grpo.errors import BatchError


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate pass@k of one prompt.

    Args:
        samples: n, how many samples were drawn.
        solved: c, how many of them solve the prompt.
        k: How many would be drawn.

    Returns:
        The estimate, in [0, 1].

    Raises:
        BatchError: Not ``0 <= solved <= samples`` and ``1 <= k <= samples``.
    """
    if not (0 <= solved <= samples and 1 <= k <= samples):
        raise BatchError(
            "pass@k cannot be estimated",
            seen=f"k = {k}, {solved} of {samples} samples solved",
            expected="1 <= k <= samples and 0 <= solved <= samples",
            fix="raise evaluation.samples_per_prompt or lower evaluation.pass_k",
        )
    if samples - solved < k:
        return 1.0
    # The quotient of the binomials as a product of small factors: exact integers would be huge, floats overflow.
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - solved + 1, samples + 1))


def evaluation_metrics(
    rewards: Mapping[str, Sequence[float]], *, pass_k: Sequence[int] = (1,), solved_at: float = 1.0
) -> dict[str, float]:
    """Return the metrics of one evaluation.

    Args:
        rewards: The rewards of each prompt's samples, by the prompt's identity.
        pass_k: The k of each pass@k.
        solved_at: Reward from which on a sample counts as solved.

    Returns:
        ``eval/reward``, the mean over prompts of their mean reward; ``eval/reward_sem``, its standard error over
        prompts (0 for one prompt); ``eval/pass@{k}``; ``eval/prompts`` and ``eval/samples``, how many there were.

    Raises:
        BatchError: There are no prompts, a prompt has fewer samples than a k, or a reward is not finite; it is named.
    """
    if not rewards:
        raise BatchError("nothing was evaluated", seen="no prompts", expected="at least one")
    for name, scores in rewards.items():
        if len(scores) < max(pass_k, default=1) or not all(math.isfinite(score) for score in scores):
            raise BatchError(
                "the samples of a prompt cannot be evaluated",
                where=f"prompt {name!r}",
                seen=f"rewards {list(scores)}",
                expected=f"at least {max(pass_k, default=1)} finite numbers",
            )
    means = [statistics.fmean(scores) for scores in rewards.values()]
    spread = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    metrics = {"eval/reward": statistics.fmean(means), "eval/reward_sem": spread}
    for k in pass_k:
        estimates = [
            pass_at_k(len(scores), sum(score >= solved_at for score in scores), k) for scores in rewards.values()
        ]
        metrics[f"eval/pass@{k}"] = statistics.fmean(estimates)
    return metrics | {"eval/prompts": float(len(rewards)), "eval/samples": float(sum(map(len, rewards.values())))}
