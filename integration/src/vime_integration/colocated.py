"""The colocated pipeline: generate, score, train, update, on the same devices, one after the other.

Step ``k`` (from 1) of a run::

    rollout          every sample from weights of version k
    train            the optimiser steps of these samples
    update_weights   the trainer ranks stage, every engine verifies, all commit version k + 1
    save             every `checkpoint.every` steps, and at the end

Invariants. A token is trained on in the step that it was sampled in, and in no other (lag 0). Engines serve one version
at a time, and it is the one that the next rollout asks for. A bundle is written after the engines have committed, so
what is saved is what is served. The driver holds numbers and references; it never holds a tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vime_grpo import RunConfig
from vime_sync import SyncReport, SyncSession, merge_manifests

from vime_integration.actors.rollout import RolloutReport, step_deadline
from vime_integration.actors.trainer import TrainReport
from vime_integration.bundle import Bundle, BundleStore
from vime_integration.errors import PipelineError
from vime_integration.fleet import Fleet
from vime_integration.metrics import DIFFERENCE, step_metrics
from vime_integration.phases import Phases
from vime_integration.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Keep and show the metrics of one finished step."""
        ...


class Colocated:
    """One run of the colocated pipeline, over processes that are there.

    Args:
        config: The run's configuration.
        fleet: The processes, created but not started.
        run: The run folder.
        tracker: Where metrics go.
        show: Told the name of each phase as it begins.
        stopping: Asked between steps; True ends the run after a save.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        run: RunFolder,
        tracker: Tracker,
        show: Callable[[str], None] = lambda _phase: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep the parts."""
        self._config = config
        self._fleet = fleet
        self._run = run
        self._tracker = tracker
        self._show = show
        self._stopping = stopping
        self._bundles = BundleStore(run.checkpoints, keep=config.checkpoint.keep)
        self._session: SyncSession | None = None
        self._step = 0
        self._saved_at = -1

    @property
    def version(self) -> int:
        """The weight version that the next rollout asks for."""
        return self._step + 1

    def start(self, bundle: Bundle | None) -> None:
        """Start the processes, continue from a bundle if there is one, and give the engines the weights.

        Raises:
            VimeError: Something did not start, or the bundle does not fit.
        """
        manifests = self._fleet.start()
        if bundle is not None:
            self._restore(bundle)
        urls = [address.url for address in self._fleet.addresses]
        self._session = SyncSession(urls, merge_manifests(manifests), deadline_s=self._config.sync.deadline_s)
        self._update_weights()

    def run(self) -> None:
        """Run the remaining steps.

        Raises:
            VimeError: The first error of any process, or a guard that was tripped. What was saved before is valid.
        """
        last = self._config.pipeline.steps
        while self._step < last and not self._stopping():
            metrics = self._one_step()
            self._tracker.log(self._step, metrics)
            self._guard(metrics)
            every = self._config.checkpoint.every
            if every and self._step % every == 0:
                self._save()
        if self._saved_at != self._step:
            self._save()
        if self._step >= last:
            self._export()

    def stop(self) -> None:
        """Let the engines go and end every process."""
        if self._session is not None:
            self._session.close()
        self._fleet.stop()

    def _one_step(self) -> dict[str, float]:
        phases = Phases(self._show)
        with phases.phase("rollout"):
            rollout: RolloutReport = self._fleet.ask_rollout(
                "collect", self.version, doing="make the rollout", deadline_s=step_deadline(self._config) + 30.0
            )
        with phases.phase("train"):
            reports: list[TrainReport] = self._fleet.ask_trainers("train", rollout.batch, doing="train")
        self._step += 1
        with phases.phase("update_weights"):
            report = self._update_weights()
        metrics = phases.metrics() | rollout.metrics | step_metrics(reports, report)
        if metrics["rollout/raw_reward"] == 0:
            logger.warning("step %d: every reward is 0; most often: %s", self._step, rollout.why_zero)
        return metrics

    def _update_weights(self) -> SyncReport:
        if self._session is None:
            raise PipelineError("weights cannot be updated before the run was started")
        self._fleet.ask_trainers("stage", self.version, doing="stage the weights")
        report = self._session.update(self.version)
        if report.version != self.version:
            raise PipelineError(
                "engines committed another version", seen=str(report.version), expected=str(self.version)
            )
        return report

    def _guard(self, metrics: dict[str, float]) -> None:
        guards = self._config.guards
        limit = guards.logprob_difference
        if guards.logprob_difference_action == "stop" and metrics[DIFFERENCE] > limit:
            raise PipelineError(
                "trainer and engine disagree about the log-probabilities of the sampled tokens",
                where=f"step {self._step}",
                seen=f"mean absolute difference {metrics[DIFFERENCE]:.3g}",
                expected=f"at most {limit:g} (guards.logprob_difference)",
                fix="check that dtype, temperature and context are the same on both sides; top_p and top_k cut the "
                "engine's distribution and need the guard off",
            )

    def _save(self) -> None:
        state = {
            "step": self._step,
            "version": self.version,
            "data": self._fleet.ask_rollout("state_dict", doing="say where in the data it is", deadline_s=60.0),
            "saved_at": time.time(),
        }

        def fill(folder: Path) -> None:
            self._fleet.ask_trainers("save", folder.absolute() / "trainer", doing="save")

        bundle = self._bundles.write(self._step, state, fill)
        self._saved_at = self._step
        logger.info("saved %s", bundle.path)

    def _restore(self, bundle: Bundle) -> None:
        self._fleet.ask_trainers("load", bundle.path.absolute() / "trainer", doing="load the checkpoint")
        data: dict[str, Any] = bundle.state["data"]
        self._fleet.ask_rollout("load_state_dict", data, doing="continue in the data", deadline_s=60.0)
        self._step = self._saved_at = bundle.step
        logger.info("continuing after step %d", self._step)

    def _export(self) -> None:
        self._fleet.ask_trainers("export", self._run.model.absolute(), doing="export the model")
