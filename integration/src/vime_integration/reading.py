"""The samples of a rollout that a person should read: the best and the worst, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vime_grpo import SampleRecord, extremes
from vime_rollout import Prompt, Sample


def records_of(samples: Sequence[Sample], prompts: Mapping[str, Prompt], keep: int) -> list[SampleRecord]:
    """Return the best and the worst samples of a rollout as text.

    Args:
        samples: Scored.
        prompts: Group id -> prompt.
        keep: How many of each; 0 returns none.
    """
    if not keep:
        return []
    best, worst = extremes([s.reward or 0.0 for s in samples], [s.group_id for s in samples], keep)
    chosen = [("best", position) for position in best] + [("worst", position) for position in worst]
    return [
        SampleRecord(
            rank="best" if rank == "best" else "worst",
            reward=samples[position].reward or 0.0,
            prompt=text_of(prompts[samples[position].group_id]),
            response=samples[position].response,
            group=samples[position].group_id,
            index=samples[position].index,
            reason=samples[position].reward_reason,
            label=samples[position].label,
            status=samples[position].status.value,
            tokens=samples[position].response_length,
        )
        for rank, position in chosen
    ]


def text_of(prompt: Prompt) -> str:
    """Return a prompt as a person reads it: its text, or its messages with their roles."""
    return prompt.text or "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)
