"""The scorer of a reasoning-gym task (runs in a worker process)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vime_rollout.data.gym import GYM_KEY, gym_dataset
from vime_rollout.errors import RewardError
from vime_rollout.sample import Sample

_SHOWN = 80


def gym_payload(sample: Sample, *, answer_tag: str | None = None) -> dict[str, Any]:
    """Return what ``grade_gym`` needs of a sample.

    Args:
        sample: A sample of a reasoning-gym prompt.
        answer_tag: The answer is inside the last ``<tag>...</tag>``; ``None``: it is the whole response.

    Raises:
        RewardError: When the sample is not of a reasoning-gym prompt.
    """
    if GYM_KEY not in sample.metadata:
        raise RewardError(
            "sample is not of a reasoning-gym task",
            where=f"reward reasoning_gym, group {sample.group_id}",
            seen=f"metadata keys {sorted(sample.metadata)}",
            expected=f"{GYM_KEY!r}, as reasoning-gym prompts have",
        )
    return {"recipe": dict(sample.metadata[GYM_KEY]), "response": sample.response, "answer_tag": answer_tag}


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
