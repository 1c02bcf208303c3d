"""The colocated pipeline: generate, score, train, update, on the same devices, one after the other.

Step ``k`` (from 1) of a run::

    offload          where little of the device is free, the trainer's unused memory goes back to it (GPU); where there
                     is no room for both, gradients and optimiser too
    rollout          every sample from weights of version k
    sleep, onload    engines give their memory back, the trainer takes its own (GPU; `vime_integration.sharing`)
    train            the optimiser steps of these samples
    update_weights   the trainer ranks stage, every engine verifies, all commit version k + 1

Invariants. A token is trained on in the step that it was sampled in, and in no other (lag 0). Engines serve one version
at a time, and it is the one that the next rollout asks for.
"""

from __future__ import annotations

from vime_integration.actors.rollout import RolloutReport
from vime_integration.memory import moved_metrics, slept_metrics
from vime_integration.phases import Phases
from vime_integration.pipeline import Pipeline
from vime_integration.translate import step_deadline

#: Seconds that all engines may take to fall asleep or to wake.
SLEEP_S = 300.0


class Colocated(Pipeline):
    """One run of the colocated pipeline; see `Pipeline` for what it shares with the asynchronous one."""

    def _one_step(self, phases: Phases) -> tuple[dict[str, float], RolloutReport]:
        memory: dict[str, float] = {}
        if self._fleet.makes_room:
            with phases.phase("offload"):
                reports = self._fleet.ask_trainers("make_room", self._fleet.offloads, doing="give memory back")
                memory |= moved_metrics("offload", reports)
        with phases.phase("rollout"):
            rollout: RolloutReport = self._fleet.ask_rollout(
                "collect", self.version, doing="make the rollout", deadline_s=step_deadline(self._config)
            )
        if self._fleet.sleeps:
            memory |= self._sleep(phases)
        if self._fleet.offloads:
            with phases.phase("onload"):
                memory |= moved_metrics("onload", self._fleet.ask_trainers("take_room", doing="take memory back"))
        if not self._fleet.sleeps:
            trained = self._train(phases, rollout)
        else:
            trained = self._train(phases, rollout, lambda: self._wake(phases, "weights"))
            self._wake(phases, "kv_cache")
        return phases.metrics() | rollout.metrics | trained | memory, rollout

    def _sleep(self, phases: Phases) -> dict[str, float]:
        with phases.phase("sleep"):
            before = self._fleet.ask_trainers("memory", doing="say what is free")
            self._fleet.ask_rollout("sleep", doing="put the engines to sleep", deadline_s=SLEEP_S)
            return slept_metrics(before, self._fleet.ask_trainers("memory", doing="say what is free"))

    def _wake(self, phases: Phases, tag: str) -> None:
        with phases.phase("wake"):
            self._fleet.ask_rollout("wake", tag, doing=f"wake the engines ({tag})", deadline_s=SLEEP_S)
