"""The scorer of a reasoning-gym task. Imported in worker processes only: some scorers evaluate what they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym  # noqa: F401 - imported before the first payload, whose time-out must not pay for it

from vime_rollout.data.gym import gym_dataset

_SHOWN = 80


def grade_gym(payload: Mapping[str, Any]) -> tuple[float, str]:
    """Return the task's own score of the answer, 0 to 1, and a reason where it is less than 1."""
    recipe = payload["recipe"]
    answer = _answer(payload["response"], payload["answer_tag"])
    if answer is None:
        return 0.0, f"no answer: no <{payload['answer_tag']}> in the response"
    dataset = gym_dataset(recipe["task"], recipe["seed"], recipe["size"], recipe["options"])
    entry = dataset[recipe["index"]]
    value = float(dataset.score_answer(answer, entry))
    if value >= 1.0:
        return value, ""
    return value, f"answer {answer[-_SHOWN:]!r} scores {value:g}, label {str(entry['answer'])[:_SHOWN]!r}"


def _answer(response: str, tag: str | None) -> str | None:
    if tag is None:
        return response.strip()
    matches = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
    return matches[-1].strip() if matches else None
