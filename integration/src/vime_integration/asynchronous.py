"""The asynchronous pipeline: engines generate all the time, on devices of their own, while the trainer trains.

Step ``k`` (from 1) of a run, beside generation that never stops::

    wait_for_rollout the next batch, in the order of the data; no token older than version k - max_weight_lag
    train            the optimiser steps of these samples
    update_weights   engines freeze what they generate, all commit version k + 1, and go on

Invariants. How far generation may run ahead is arithmetic (`vime_integration.admission`), so nothing that was begun can
become too old. A token knows the version that sampled it; what is trained on is checked, sample by sample. Every prompt
is trained on once, or replayed, or dropped with a reason, and ``prompts.jsonl`` says which; a resume generates again
what was in flight.
"""

from __future__ import annotations

from vime_integration.actors.rollout import RolloutReport
from vime_integration.bundle import Bundle
from vime_integration.phases import Phases
from vime_integration.pipeline import SHORT_S, Pipeline
from vime_integration.translate import step_deadline


class Asynchronous(Pipeline):
    """One run of the asynchronous pipeline; see `Pipeline` for what it shares with the colocated one."""

    def start(self, bundle: Bundle | None) -> None:
        """Start as every pipeline does, then let generation begin.

        Raises:
            VimeError: Something did not start, or the bundle does not fit.
        """
        super().start(bundle)
        self._fleet.ask_rollout("begin", self.version, doing="begin to generate", deadline_s=SHORT_S)

    def _one_step(self, phases: Phases) -> tuple[dict[str, float], RolloutReport]:
        with phases.phase("wait_for_rollout"):
            rollout: RolloutReport = self._fleet.ask_rollout(
                "take", self.version, doing="make the next batch", deadline_s=step_deadline(self._config)
            )
        trained = self._train(phases, rollout)
        self._fleet.ask_rollout("weights_changed", self.version, doing="note the new weights", deadline_s=SHORT_S)
        metrics = phases.metrics() | rollout.metrics | trained
        tokens = rollout.metrics["rollout/response_lengths"] * rollout.metrics["rollout/samples"]
        metrics["perf/tokens_per_gpu_per_sec"] = tokens / metrics["perf/step_time"] / self._fleet.engine_devices
        return metrics, rollout
