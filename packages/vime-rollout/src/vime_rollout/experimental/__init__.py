"""What may still change: over-sampling with group filters."""

from vime_rollout.experimental.collect import Collection, collect
from vime_rollout.filters import GroupFilter, differing_rewards

__all__ = ["Collection", "GroupFilter", "collect", "differing_rewards"]
