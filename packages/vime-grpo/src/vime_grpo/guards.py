"""Guards: what must not go unseen in a run, each with a threshold and an action.

A guard looks at the metrics of a step and raises an alarm when they cross its threshold. What follows is the caller's:
an alarm whose action is ``stop`` ends the run, whose last save stays the newest (what tripped a guard is not worth
keeping), ``warn`` is shown and the run goes on.
A guard whose action is ``off`` looks at nothing.

================== =========================================== =====================================================
guard              metrics it reads                            alarm
================== =========================================== =====================================================
nonfinite          all                                         any is NaN or infinite
logprob_difference ``train/train_rollout_logprob_abs_diff``    above the threshold: not the same model on both sides
zero_rewards       ``rollout/raw_reward``,                     every sample scored 0, so many steps in a row
                   ``rollout/zero_std/...``
max_lag            ``rollout/lag/max``                         a trained token older than pipeline.max_weight_lag
engine_version     ``sync/version``,                           an engine holds other weights than were published
                   ``sync/engine_version/{min,max}``
================== =========================================== =====================================================

A metric that a step does not have is not judged: the colocated loop has no lag, for instance. The only state is the
number of steps without a reward; it is saved and restored with the run, so that a resume does not forget it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vime_grpo.config import RunConfig
    from vime_grpo.config.watching import GuardsSection

LOGPROB_DIFFERENCE = "train/train_rollout_logprob_abs_diff"
RAW_REWARD = "rollout/raw_reward"
EQUAL_GROUPS = "rollout/zero_std/ratio"
EQUAL_GROUPS_OF = "rollout/zero_std/count_"
LAG_MAX = "rollout/lag/max"
PUBLISHED_VERSION = "sync/version"
ENGINE_VERSIONS = ("sync/engine_version/min", "sync/engine_version/max")


@dataclass(frozen=True)
class Alarm:
    """What a guard found.

    Attributes:
        name: The guard, as in the section [guards].
        action: What the configuration asks for.
        text: What was seen, what was expected, and what to look at.
    """

    name: str
    action: Literal["warn", "stop"]
    text: str


class Guards:
    """Judges the metrics of each step.

    Args:
        section: Thresholds and actions.
        max_weight_lag: Most versions between a token and the weights that train on it.
    """

    def __init__(self, section: GuardsSection, *, max_weight_lag: int) -> None:
        """Start with no step seen."""
        self._section = section
        self._max_weight_lag = max_weight_lag
        self._zeros = 0

    @classmethod
    def from_config(cls, config: RunConfig) -> Guards:
        """Build the guards of a run."""
        return cls(config.guards, max_weight_lag=config.pipeline.max_weight_lag)

    def check(self, step: int, metrics: Mapping[str, float], reasons: Sequence[tuple[str, int]] = ()) -> list[Alarm]:
        """Judge a step; call once a step, in order.

        Args:
            step: Number of the step.
            metrics: All its metrics by name.
            reasons: The verifier's most frequent reasons for scores of 0, each with how often.

        Returns:
            The alarms, those that stop the run first.
        """
        self._zeros = self._zeros + 1 if _all_zero(metrics) else 0
        findings = {
            "nonfinite": _nonfinite(metrics),
            "logprob_difference": self._difference(metrics),
            "zero_rewards": self._zero_rewards(reasons),
            "max_lag": self._lag(metrics),
            "engine_version": _other_versions(metrics),
        }
        alarms = []
        for name, text in findings.items():
            action = getattr(self._section, f"{name}_action")
            if text and action != "off":
                alarms.append(Alarm(name, action, f"step {step}: {text}"))
        return sorted(alarms, key=lambda alarm: alarm.action != "stop")

    def _difference(self, metrics: Mapping[str, float]) -> str:
        value, limit = metrics.get(LOGPROB_DIFFERENCE), self._section.logprob_difference
        # Written so that NaN is above every limit.
        if value is None or value <= limit:
            return ""
        return (
            "trainer and engine disagree about the log-probabilities of the sampled tokens: mean absolute difference "
            f"{value:.3g}, expected at most {limit:g} (guards.logprob_difference); check that dtype, temperature and "
            "context are the same on both sides, and that the last weight update reached every engine"
        )

    def _zero_rewards(self, reasons: Sequence[tuple[str, int]]) -> str:
        if self._zeros < self._section.zero_rewards:
            return ""
        why = "; ".join(f"{reason} ({count} times)" for reason, count in reasons) or "none were given"
        return (
            f"every sample was scored 0, in {self._zeros} steps in a row (guards.zero_rewards = "
            f"{self._section.zero_rewards}); the verifier's reasons, most frequent first: {why}"
        )

    def _lag(self, metrics: Mapping[str, float]) -> str:
        lag = metrics.get(LAG_MAX)
        if lag is None or lag <= self._max_weight_lag:
            return ""
        return (
            f"a trained token was sampled {lag:g} versions before the weights that trained on it, expected at most "
            f"{self._max_weight_lag} (pipeline.max_weight_lag)"
        )

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to know, JSON values."""
        return {"zero_reward_steps": self._zeros}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state."""
        self._zeros = int(state["zero_reward_steps"])


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that can be written to the metrics file, for runs that only warn of the others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _nonfinite(metrics: Mapping[str, float]) -> str:
    bad = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    return f"{len(bad)} metrics are not finite: {', '.join(bad)}" if bad else ""


def _all_zero(metrics: Mapping[str, float]) -> bool:
    """Return whether every sample of the step was scored 0; a mean of 0 alone may hide 1 and -1."""
    if metrics.get(RAW_REWARD) != 0:
        return False
    equal = {name.removeprefix(EQUAL_GROUPS_OF) for name in _counted(metrics)}
    return EQUAL_GROUPS not in metrics or (metrics[EQUAL_GROUPS] == 1 and equal <= {"0", "-0"})


def _counted(metrics: Mapping[str, float]) -> Iterator[str]:
    return (name for name, value in metrics.items() if name.startswith(EQUAL_GROUPS_OF) and value > 0)


def _other_versions(metrics: Mapping[str, float]) -> str:
    published = metrics.get(PUBLISHED_VERSION)
    seen = [metrics[name] for name in ENGINE_VERSIONS if name in metrics]
    if published is None or all(version == published for version in seen):
        return ""
    return (
        f"engines hold the weights of version {' to '.join(f'{version:g}' for version in dict.fromkeys(seen))}, "
        f"expected {published:g}, which the trainer published last"
    )
