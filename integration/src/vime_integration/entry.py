"""The door of the pipelines: ``vime-grpo train`` finds ``run`` through the entry point group ``vime_grpo.pipelines``.

Both modes come in by this door; ``pipeline.mode`` decides which pipeline runs, and everything around it is the same.

Exit codes: 0 when the run finished, 75 (``EX_TEMPFAIL`` of sysexits.h: try again) when SIGTERM ended it and there is a
checkpoint to go on from, so that a scheduler can tell "resume me" from "done", and 143, as of any process that SIGTERM
ends, when there is none (``checkpoint.last = false``). Errors are raised, and the launcher prints them.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vime_devices import detect_platform, ray_environment
from vime_grpo import (
    MetricsWriter,
    RunConfig,
    SamplesWriter,
    TimelineWriter,
    Tracker,
    make_display,
    open_trackers,
    read_metrics,
    save_config,
)

from vime_integration.asynchronous import Asynchronous
from vime_integration.budget import check_budget
from vime_integration.bundle import Bundle, BundleStore
from vime_integration.cluster import log_to_file, ray_cluster
from vime_integration.colocated import Colocated
from vime_integration.fleet import Fleet
from vime_integration.foreign import check_foreign
from vime_integration.ledger import Ledger
from vime_integration.pipeline import Pipeline
from vime_integration.placement import place
from vime_integration.plot import plot_reward
from vime_integration.preflight import check_before_start
from vime_integration.recording import RunRecorder
from vime_integration.resume import check_same_run
from vime_integration.run_folder import RunFolder

logger = logging.getLogger(__name__)

EXIT_STOPPED = 75
EXIT_LOST = 128 + signal.SIGTERM


class StopRequest:
    """Whether SIGTERM has asked the run to save and stop."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.asked = False

    def __call__(self) -> bool:
        """Tell whether to stop."""
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as the request; a second one ends the run like Ctrl-C."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


PIPELINES: dict[str, type[Pipeline]] = {"colocated": Colocated, "async": Asynchronous}


def run(config: RunConfig, *, resume: Path | None = None) -> int:
    """Run a pipeline to its end.

    Args:
        config: The resolved configuration; ``pipeline.mode`` names the pipeline.
        resume: A run folder to continue, or None for a fresh run.

    Returns:
        The exit code of the process.

    Raises:
        VimeError: The run failed; what was saved before is valid.
    """
    check_before_start(config, resume)
    unasked = check_foreign(config)
    folder = RunFolder(resume or config.pipeline.run_dir)
    moved = None
    if resume is None:
        moved = folder.begin()
    else:
        folder.reopen()
    notes = [] if moved is None else [f"moved the earlier run to {moved}"]
    with folder.held():
        bundle = None if resume is None else _saved(folder, config)
        save_config(config, folder.config)
        return _run(config, folder, bundle, [*notes, f"run folder {folder.root}"], unasked)


def _run(
    config: RunConfig, folder: RunFolder, bundle: Bundle | None, notes: Sequence[str], unasked: Sequence[str]
) -> int:
    """Run in a folder that is this process's; ``notes`` are shown first, ``unasked`` is logged besides."""
    log_to_file(folder.logs / "driver.log")
    placement = place(config, detect_platform())
    config = check_budget(config, placement)
    stop = StopRequest()
    after = None if bundle is None else bundle.step
    with (
        make_display(config.tracking.console, config.pipeline.steps) as display,
        MetricsWriter(folder.metrics, resume_step=after) as writer,
        Ledger(folder.prompts, resume_step=after) as ledger,
        SamplesWriter(folder.samples, resume_step=after) as samples,
        TimelineWriter(folder.phases, resume_step=after) as timeline,
        _trackers(config, folder, after) as trackers,
    ):
        recorder = RunRecorder(writer, ledger, samples, timeline, trackers, display)
        for note in notes:
            display.note(note)
        for line in (*placement.describe(), *unasked):
            display.note(line)
            logger.info("%s", line)
        display.phase("start")
        actors = len(placement.trainers) + len(placement.engines) + 1
        # Ray takes SIGTERM for itself when it starts, so the run listens after that.
        cluster = ray_cluster(cpus=actors, environment=ray_environment(placement.platform))
        with cluster as temporary, stop.listening():
            fleet = Fleet(config, placement, folder, display.note, temporary)
            pipeline = PIPELINES[config.pipeline.mode](config, fleet, folder, recorder, display.phase, stop)
            try:
                pipeline.start(bundle)
                pipeline.run()
            finally:
                pipeline.stop()
    history = read_metrics(folder.metrics)
    if config.tracking.plot and history:
        plot_reward(folder.metrics, folder.plot)
    display.finish(history)
    return exit_code(pipeline)


def exit_code(pipeline: Pipeline) -> int:
    """Return what a run that raised nothing ends with: whether it is done, can be resumed, or is lost."""
    if pipeline.finished:
        return 0
    return EXIT_LOST if pipeline.saved_step is None else EXIT_STOPPED


@contextmanager
def _trackers(config: RunConfig, folder: RunFolder, resume_step: int | None) -> Iterator[list[Tracker]]:
    trackers = open_trackers(config, folder.root, resume_step)
    try:
        yield trackers
    finally:
        for tracker in trackers:
            tracker.close()


def _saved(folder: RunFolder, config: RunConfig) -> Bundle:
    """Return the bundle to continue from."""
    check_same_run(config, folder)
    return BundleStore(folder.checkpoints, keep=config.checkpoint.keep).latest()
