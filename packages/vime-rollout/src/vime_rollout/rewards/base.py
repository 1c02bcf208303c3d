"""What a reward is: a sample goes in; a finite score with a reason, or an error with a cause, comes out.

A score of 0 always has a reason, because "all rewards are zero" is the most common failure of a run and the reason is
what tells a weak policy from a broken verifier. A time-out is a score of 0 with a reason that starts with
``TIMEOUT_REASON``: one response that drives a verifier mad must not end a run, and metrics count how many did. Any
other failure of a reward function is a bug in it, and ends the step with the cause.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vime_rollout import dotted
from vime_rollout.errors import RewardError
from vime_rollout.sample import Sample

#: How the reason of a timed-out score begins.
TIMEOUT_REASON = "timed out"


@dataclass(frozen=True, slots=True)
class Score:
    """One score.

    Args:
        value: A finite number.
        reason: Why; may be empty for a score other than 0.
    """

    value: float
    reason: str = ""


RewardFunction = Callable[..., Awaitable[float | Score]]
"""``async def fn(sample: Sample, **options) -> float | Score``: the form of a reward of your own."""


class Reward(Protocol):
    """A reward that is ready to score."""

    name: str

    async def score(self, sample: Sample) -> Score:
        """Score one sample; the answer is finite, and has a reason where it is 0."""
        ...

    def close(self) -> None:
        """End what the reward started (worker processes)."""
        ...


class FunctionReward:
    """A reward made of one async function.

    Args:
        name: For errors and reasons.
        function: The function, options bound.
        timeout_s: Seconds for one sample.
    """

    def __init__(self, name: str, function: RewardFunction, *, timeout_s: float) -> None:
        """Keep the function."""
        self.name = name
        self._function = function
        self._timeout_s = timeout_s

    async def score(self, sample: Sample) -> Score:
        """Call the function under its time-out and check what it answers.

        Raises:
            RewardError: When it raises, or answers something that is no finite number.
        """
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                answer = await self._function(sample)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return Score(0.0, f"{TIMEOUT_REASON} after {self._timeout_s:g} s")
            if isinstance(error, RewardError):
                raise
            raise RewardError(
                "reward function failed",
                where=f"reward {self.name}, {name_of(sample)}",
                seen=f"{type(error).__name__}: {error}",
            ) from error
        return checked(answer, self.name, sample)

    def close(self) -> None:
        """Nothing was started."""


def checked(answer: object, name: str, sample: Sample) -> Score:
    """Return the answer of a reward as a score that keeps the promises of one.

    Raises:
        RewardError: When it is no finite number.
    """
    value, reason = (answer.value, answer.reason) if isinstance(answer, Score) else (answer, "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(
            "reward is no finite number",
            where=f"reward {name}, {name_of(sample)}",
            seen=f"{value!r} ({type(value).__name__})",
            expected="float or Score",
        )
    return Score(float(value), reason or (f"{name} answered 0 without a reason" if value == 0 else ""))


def need_label(sample: Sample, name: str) -> str:
    """Return the sample's label.

    Raises:
        RewardError: When it has none.
    """
    if sample.label is None:
        raise RewardError(
            "reward needs a label", where=f"reward {name}, {name_of(sample)}", fix="set the data set's label key"
        )
    return sample.label


def load_function(path: str, options: Mapping[str, Any]) -> RewardFunction:
    """Import ``package.module:function`` (or with a dot) and bind the options.

    Raises:
        RewardError: When it cannot be imported, is no async function, or does not take the options.
    """
    kind, form = "reward function", "async def fn(sample: Sample) -> float | Score"
    target = dotted.find(path, kind, RewardError)
    return dotted.bind(target, path, kind, form, ("sample",), options=options, asynchronous=True, error=RewardError)


def name_of(sample: Sample) -> str:
    """Return the sample's name in errors."""
    return f"sample {sample.index} of group {sample.group_id}"
