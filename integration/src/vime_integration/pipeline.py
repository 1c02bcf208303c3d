"""What the colocated and the asynchronous pipeline share: start, steps, guards, saves, stop.

A pipeline is a list of phases that one subclass writes down as ``_one_step``. Around it, the same for both::

    start      processes, the bundle to continue from, the first weights to every engine
    step       the subclass; then metrics, guards, evaluation when it is due, a save when it is due
    end        a save, unless ``checkpoint.last`` is off, and the policy as a Hugging Face folder

Invariants. Step ``k`` (from 1) trains weights of version ``k`` and leaves version ``k + 1`` on every engine before it
ends. A bundle is written between steps, after the engines have committed, so what is saved is what is served. The
driver holds numbers and references; it never holds a tensor.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from vime_grpo import RunConfig, finite_metrics
from vime_sync import SyncReport

from vime_integration.actors.rollout import RolloutReport
from vime_integration.actors.trainer import TrainReport
from vime_integration.bundle import Bundle, BundleStore
from vime_integration.errors import PipelineError
from vime_integration.fleet import Fleet
from vime_integration.gauges import process_gauges
from vime_integration.guarding import Guarding
from vime_integration.metrics import step_metrics
from vime_integration.phases import Phases
from vime_integration.run_folder import RunFolder

logger = logging.getLogger(__name__)

SHORT_S = 60.0


class Recorder(Protocol):
    """Where the record of a step goes."""

    def log(self, step: int, metrics: dict[str, float], rollout: RolloutReport) -> None:
        """Keep and show one finished step."""
        ...

    def span(self, step: int, lane: str, phase: str, begin: float, end: float) -> None:
        """Keep when a phase was, by ``time.monotonic``."""
        ...

    def note(self, text: str) -> None:
        """Show one line."""
        ...


class Pipeline(ABC):
    """One run, over processes that are there.

    Args:
        config: The run's configuration.
        fleet: The processes, created but not started.
        run: The run folder.
        recorder: Where metrics go.
        show: Told the name of each phase as it begins.
        stopping: Asked between steps; True ends the run, after a save unless ``checkpoint.last`` is off.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        run: RunFolder,
        recorder: Recorder,
        show: Callable[[str], None] = lambda _phase: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep the parts."""
        self._config = config
        self._fleet = fleet
        self._run = run
        self._recorder = recorder
        self._show = show
        self._stopping = stopping
        self._bundles = BundleStore(run.checkpoints, keep=config.checkpoint.keep)
        self._guarding = Guarding(config)
        self._step = 0
        self._saved_at: int | None = None

    @property
    def version(self) -> int:
        """The version of the weights that the trainer holds."""
        return self._step + 1

    @property
    def saved_step(self) -> int | None:
        """The step that a resume goes on after; None where there is no checkpoint."""
        return self._saved_at

    @property
    def finished(self) -> bool:
        """Whether every step was made."""
        return self._step >= self._config.pipeline.steps

    def start(self, bundle: Bundle | None) -> None:
        """Start the processes, continue from a bundle if there is one, and give the engines the weights.

        Raises:
            VimeError: Something did not start, or the bundle does not fit.
        """
        self._fleet.start(None if bundle is None else bundle.path.absolute() / "trainer")
        if bundle is not None:
            self._restore(bundle)
        with self._fleet.writing(self.version) as written:
            self._fleet.ask_trainers("stage", self.version, doing="stage the weights")
        report = self._checked(written.report)
        self._recorder.note(f"weights: {report.mode} by {report.transport}, digest {report.digest_mode}")
        for name, reason in report.reload.items():
            logger.warning("%s is loaded again by the engine at every update: %s", name, reason)

    def run(self) -> None:
        """Run the remaining steps.

        Raises:
            VimeError: The first error of any process, or a guard that was tripped. What was saved before is valid.
        """
        last, every = self._config.pipeline.steps, self._config.checkpoint.every
        if self._step == 0 and self._config.evaluation.at_start:
            self._show_evaluation(self._evaluate())
        while self._step < last and not self._stopping():
            self._finish_step(*self._one_step(Phases(self._step + 1, self._show, self._recorder.span)))
            if every and self._step % every == 0:
                self._save()
        if self._config.checkpoint.last and self._saved_at != self._step:
            self._save()
        if self.finished:
            self._fleet.ask_trainers("export", self._run.model.absolute(), doing="export the model")
        elif self._saved_at != self._step:
            self._show_unsaved()

    def stop(self) -> None:
        """Let the engines go and end every process."""
        self._fleet.stop()

    @abstractmethod
    def _one_step(self, phases: Phases) -> tuple[dict[str, float], RolloutReport]:
        """Run one step and count it; return its metrics and its rollout."""

    def _finish_step(self, metrics: dict[str, float], rollout: RolloutReport) -> None:
        every, last = self._config.evaluation.every, self._config.pipeline.steps
        if every and (self._step % every == 0 or self._step == last):
            metrics |= self._evaluate()
        metrics |= process_gauges(self._fleet.pids()) | self._fleet.counts()
        alarms = self._guarding.check(self._step, metrics, rollout.why_zero)
        self._recorder.log(self._step, finite_metrics(metrics), rollout)
        for alarm in alarms:
            self._recorder.note(alarm.text)
        self._guarding.enforce(self._step, alarms)

    def _train(
        self, phases: Phases, rollout: RolloutReport, before_commit: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Train on a rollout and bring the engines to the new weights; return the metrics of both.

        ``before_commit`` does what the engines need before they take weights.
        """
        with ExitStack() as block:
            written = block.enter_context(self._fleet.writing(self.version + 1))
            with phases.phase("train"):
                reports: list[TrainReport] = self._fleet.ask_trainers(
                    "train", rollout.batch, self.version + 1, doing="train"
                )
            self._step += 1
            for span in reports[0].spans:
                self._recorder.span(self._step, *span)
            before_commit()
            with phases.phase("update_weights"):
                block.close()
        return step_metrics(reports, self._checked(written.report))

    def _checked(self, report: SyncReport | None) -> SyncReport:
        if report is None or report.version != self.version:
            seen = "no report" if report is None else str(report.version)
            raise PipelineError("engines committed another version", seen=seen, expected=str(self.version))
        return report

    def _evaluate(self) -> dict[str, float]:
        began = time.monotonic()
        metrics: dict[str, float] = self._fleet.ask_rollout(
            "evaluate", self.version, doing="evaluate", deadline_s=self._config.trainer.step_deadline_s
        )
        ended = time.monotonic()
        self._recorder.span(self._step, "eval", "evaluate", began, ended)
        return metrics | {"perf/eval_time": ended - began}

    def _show_evaluation(self, metrics: dict[str, float]) -> None:
        self._recorder.note("before training: " + ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))

    def _save(self) -> None:
        began = time.monotonic()
        state = {
            "mode": self._config.pipeline.mode,
            "step": self._step,
            "version": self.version,
            "rollout": self._fleet.ask_rollout("state_dict", doing="say where it is in the data", deadline_s=SHORT_S),
            "guards": self._guarding.state_dict(),
            "saved_at": time.time(),
        }

        def fill(folder: Path) -> None:
            self._fleet.ask_trainers("save", folder.absolute() / "trainer", doing="save")

        self._show("save")
        logger.info("step %d: save", self._step)
        bundle = self._bundles.write(self._step, state, fill)
        self._saved_at = self._step
        ended = time.monotonic()
        self._recorder.span(self._step, "save", "save", began, ended)
        logger.info("saved %s in %.2f s", bundle.path, ended - began)

    def _show_unsaved(self) -> None:
        resume = "nothing to resume from" if self._saved_at is None else f"a resume goes on after step {self._saved_at}"
        self._recorder.note(f"stopped after step {self._step} without a save (checkpoint.last = false): {resume}")

    def _restore(self, bundle: Bundle) -> None:
        self._step = self._saved_at = bundle.step
        state: dict[str, Any] = bundle.state
        self._fleet.ask_rollout("load_state_dict", state["rollout"], doing="continue in the data", deadline_s=SHORT_S)
        self._guarding.load_state_dict(state["guards"])
        logger.info("continuing after step %d", self._step)
