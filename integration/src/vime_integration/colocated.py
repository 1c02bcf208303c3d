"""The colocated pipeline: generate, score, train, update, on the same devices, one after the other.

Step ``k`` (from 1) of a run::

    rollout          every sample from weights of version k
    train            the optimiser steps of these samples
    update_weights   the trainer ranks stage, every engine verifies, all commit version k + 1

Invariants. A token is trained on in the step that it was sampled in, and in no other (lag 0). Engines serve one version
at a time, and it is the one that the next rollout asks for.
"""

from __future__ import annotations

from vime_integration.actors.rollout import RolloutReport
from vime_integration.phases import Phases
from vime_integration.pipeline import Pipeline
from vime_integration.translate import step_deadline


class Colocated(Pipeline):
    """One run of the colocated pipeline; see `Pipeline` for what it shares with the asynchronous one."""

    def _one_step(self, phases: Phases) -> tuple[dict[str, float], RolloutReport]:
        with phases.phase("rollout"):
            rollout: RolloutReport = self._fleet.ask_rollout(
                "collect", self.version, doing="make the rollout", deadline_s=step_deadline(self._config)
            )
        trained = self._train(phases, rollout)
        return phases.metrics() | rollout.metrics | trained, rollout
