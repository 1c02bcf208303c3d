"""What may still change: over-sampling with group filters."""

from vime_rollout.experimental.collect import Collection, Collector, collect
from vime_rollout.filters import GroupFilter, differing_rewards
from vime_rollout.partial import PartialCounts, PartialSamples

__all__ = ["Collection", "Collector", "GroupFilter", "PartialCounts", "PartialSamples", "collect", "differing_rewards"]
