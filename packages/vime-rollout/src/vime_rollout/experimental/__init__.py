"""What may still change: over-sampling with filters, partial samples, several turns with tools, a router."""

from vime_rollout.experimental.collect import Collection, Collector, collect
from vime_rollout.experimental.multi_turn import MakeEnvironment, MultiTurn
from vime_rollout.experimental.router import RoutedEngines, Router, RouterConfig
from vime_rollout.experimental.tools import (
    Environment,
    ToolCall,
    ToolEnvironment,
    ToolParser,
    Turn,
    calculator,
    json_tool_calls,
)
from vime_rollout.filters import GroupFilter, differing_rewards
from vime_rollout.partial import PartialCounts, PartialSamples

__all__ = [
    "Collection",
    "Collector",
    "Environment",
    "GroupFilter",
    "MakeEnvironment",
    "MultiTurn",
    "PartialCounts",
    "PartialSamples",
    "RoutedEngines",
    "Router",
    "RouterConfig",
    "ToolCall",
    "ToolEnvironment",
    "ToolParser",
    "Turn",
    "calculator",
    "collect",
    "differing_rewards",
    "json_tool_calls",
]
