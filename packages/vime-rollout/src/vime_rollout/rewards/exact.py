"""Exact match: the response, or the part of it that a pattern marks as the answer, equals the label."""

from __future__ import annotations

import re

from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import Score, need_label
from vime_rollout.sample import Sample

_SHOWN = 80


async def exact_match(sample: Sample, *, pattern: str | None = None, ignore_case: bool = False) -> Score:
    """Return 1 when the answer equals the label, surrounding white space aside, else 0.

    Args:
        sample: The sample; needs a label.
        pattern: Regular expression with one group; its last match in the response is the answer. ``None``: all of it.
        ignore_case: Compare without regard to case.

    Raises:
        RewardError: When there is no label, or the pattern is not one with one group.
    """
    label = need_label(sample, "exact_match").strip()
    answer = sample.response.strip()
    if pattern is not None:
        found = _find(pattern, sample.response)
        if found is None:
            return Score(0.0, f"no answer: nothing in the response matches {pattern!r}")
        answer = found.strip()
    same = answer.casefold() == label.casefold() if ignore_case else answer == label
    return Score(1.0) if same else Score(0.0, f"answer {answer[-_SHOWN:]!r} differs from label {label[:_SHOWN]!r}")


def _find(pattern: str, text: str) -> str | None:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError("pattern is no regular expression", where="reward exact_match", seen=str(error)) from error
    if compiled.groups != 1:
        raise RewardError("pattern needs one group", where="reward exact_match", seen=pattern)
    matches = compiled.findall(text)
    return str(matches[-1]) if matches else None
