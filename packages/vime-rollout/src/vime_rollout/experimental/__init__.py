"""What may still change: over-sampling with group filters."""

from vime_rollout.experimental.collect import Collection, GroupFilter, collect, differing_rewards

__all__ = ["Collection", "GroupFilter", "collect", "differing_rewards"]
