"""Which groups are worth training on: filters for over-sampling.

A filter looks at one scored group and returns an empty string to keep it, or the reason to drop it. It must depend on
nothing but the group: the batch is to be the same whatever finished first, and a resumed run decides as before.
"""

from __future__ import annotations

from collections.abc import Callable

from vime_rollout.errors import ExtensionError
from vime_rollout.sample import SampleGroup

GroupFilter = Callable[[SampleGroup], str]
"""``def keep(group: SampleGroup) -> str``: an empty string keeps the group; anything else is why it is dropped."""


def differing_rewards(group: SampleGroup) -> str:
    """Drop groups whose rewards are all equal; the reason names the reward.

    Such a group has zero advantage everywhere (DAPO, arXiv:2503.14476, section 3.2: dynamic sampling).
    """
    return f"all rewards are {group.rewards[0]:g}" if len(set(group.rewards)) == 1 else ""


def all_groups(group: SampleGroup) -> str:
    """Keep every group."""
    del group
    return ""


def reason_to_drop(keep: GroupFilter, group: SampleGroup) -> str:
    """Ask a filter, and check that it answers as one.

    Raises:
        ExtensionError: When it answers something that is no string: true and false mean opposite things to different
            people, a reason does not.
    """
    answer: object = keep(group)
    if not isinstance(answer, str):
        raise ExtensionError(
            "filter answers something that is no reason",
            where=f"filter {getattr(keep, '__qualname__', keep)}, group {group.prompt.group_id}",
            seen=f"{answer!r} ({type(answer).__name__})",
            expected="an empty string to keep the group, or the reason to drop it",
        )
    return answer
