"""What graders in worker processes need of a sample, as JSON values. Made in the parent, where samples are."""

from __future__ import annotations

from typing import Any

from vime_rollout.data.gym import GYM_KEY
from vime_rollout.errors import RewardError
from vime_rollout.rewards.base import need_label
from vime_rollout.sample import Sample


def math_payload(sample: Sample) -> dict[str, Any]:
    """Return what ``grade_math`` needs of a sample.

    Raises:
        RewardError: When it has no label.
    """
    return {"response": sample.response, "label": need_label(sample, "math_verify")}


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
