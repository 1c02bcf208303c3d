"""Rewards by name (``exact_match``, ``math_verify``, ``reasoning_gym``) or by the dotted path of your own function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import TIMEOUT_REASON, FunctionReward, Reward, RewardFunction, Score, load_function
from vime_rollout.rewards.exact import exact_match
from vime_rollout.rewards.grader import WorkerReward
from vime_rollout.rewards.payloads import gym_payload, math_payload

BUILT_IN = ("exact_match", "math_verify", "reasoning_gym")


def load_reward(
    name: str, *, timeout_s: float = 30.0, options: Mapping[str, Any] | None = None, workers: int = 2
) -> Reward:
    """Return the reward of a name or a dotted path.

    Args:
        name: One of ``BUILT_IN``, or ``package.module:function`` of ``async def fn(sample, **options) -> float``.
        timeout_s: Seconds for one sample.
        options: Keyword arguments: of the function, or ``pattern`` and ``ignore_case`` (``exact_match``),
            ``answer_tag`` (``reasoning_gym``).
        workers: Processes of the rewards that grade in processes of their own.

    Raises:
        RewardError: When there is no such reward, or it does not take the options.
    """
    bound = dict(options or {})
    if name == "math_verify":
        _check_options(name, bound, set())
        return WorkerReward(
            name, "vime_rollout.rewards.grade_math:grade_math", math_payload, timeout_s=timeout_s, workers=workers
        )
    if name == "reasoning_gym":
        _check_options(name, bound, {"answer_tag"})
        if find_spec("reasoning_gym") is None:
            raise RewardError("reasoning-gym is not installed", fix="pip install 'vime-rollout[reasoning-gym]'")
        payload = partial(gym_payload, **bound)
        return WorkerReward(
            name, "vime_rollout.rewards.grade_gym:grade_gym", payload, timeout_s=timeout_s, workers=workers
        )
    if name == "exact_match":
        _check_options(name, bound, {"pattern", "ignore_case"})
        return FunctionReward(name, partial(exact_match, **bound), timeout_s=timeout_s)
    if "." not in name and ":" not in name:
        raise RewardError("unknown reward", seen=name, expected=", ".join(BUILT_IN) + ", or package.module:function")
    return FunctionReward(name, load_function(name, bound), timeout_s=timeout_s)


def _check_options(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(options) - known):
        raise RewardError(
            "reward does not take an option",
            where=f"reward {name}",
            seen=", ".join(unknown),
            expected=", ".join(sorted(known)) or "no options",
        )


__all__ = ["BUILT_IN", "TIMEOUT_REASON", "Reward", "RewardFunction", "Score", "load_reward"]
