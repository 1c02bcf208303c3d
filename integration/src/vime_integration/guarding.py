"""The guards of a run: thresholds from the configuration, and what happens when one is passed.

The rules are vime-grpo's (`vime_grpo.Guards`); here an alarm becomes a warning on the terminal, or the end of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vime_grpo import Alarm, Guards, RunConfig

from vime_integration.errors import PipelineError
from vime_integration.metrics import DIFFERENCE
from vime_integration.staleness import ON_POLICY_DIFFERENCE

logger = logging.getLogger(__name__)


class Guarding:
    """Applies the guards after every step.

    Args:
        config: The run's configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        """Begin with nothing seen."""
        self._guards = Guards.from_config(config)
        old_tokens = config.pipeline.mode == "async" or config.rollout.partial
        self._stale = old_tokens and config.pipeline.max_weight_lag > 0

    def check(self, step: int, metrics: Mapping[str, float], why_zero: Sequence[tuple[str, int]]) -> list[Alarm]:
        """Look at one step.

        Args:
            step: Its number.
            metrics: Its metrics.
            why_zero: The most frequent reasons of rewards of 0, with counts.

        Returns:
            The alarms, logged; hand them to ``enforce`` once the step is on record.
        """
        judged = dict(metrics)
        if self._stale:  # what training changed is no disagreement: only on-policy tokens are judged
            judged.pop(DIFFERENCE, None)
            if ON_POLICY_DIFFERENCE in metrics:
                judged[DIFFERENCE] = metrics[ON_POLICY_DIFFERENCE]
        alarms = self._guards.check(step, judged, why_zero)
        for alarm in alarms:
            logger.warning("guard %s: %s", alarm.name, alarm.text)
        return alarms

    @staticmethod
    def enforce(step: int, alarms: Sequence[Alarm]) -> None:
        """End the run if an alarm asks for it.

        Raises:
            PipelineError: An alarm's action is "stop".
        """
        stops = [alarm for alarm in alarms if alarm.action == "stop"]
        if stops:
            raise PipelineError(
                f"a guard stopped the run: {stops[0].name}",
                where=f"step {step}",
                seen="; ".join(alarm.text for alarm in stops),
                fix=f'what was saved before is valid; guards.{stops[0].name}_action = "warn" lets such a run go on',
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the guards remember, as JSON values."""
        return self._guards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what the guards remembered."""
        self._guards.load_state_dict(state)
