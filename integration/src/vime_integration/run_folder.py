"""The run folder: everything that a run leaves behind, in one place with fixed names.

::

    runs/demo/
        config.toml       the resolved configuration
        metrics.jsonl     one object a step
        prompts.jsonl     what became of every prompt, one object a step
        samples.jsonl     the best and the worst samples of each step
        phases.jsonl      when each phase of each step began and ended
        reward.png        reward against step
        manifest.json     where the trainer's weights lie, for engines that run on them
        weights/          the newest versions of the weights, where sync.transport = "disk"
        logs/             one file a process
        checkpoints/      resume bundles (bundle.py)
        model/            the trained policy as a Hugging Face folder
        lock              held by the process that runs here

A folder that already holds a run is never written into by a fresh one: the old run is moved aside, whole, under the
time of its last write, and the new one says so. One that is still going on is not touched: it would write its next
checkpoint into the new run's folder, for that has its path.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from vime_integration.errors import PipelineError, ResumeError

logger = logging.getLogger(__name__)


class RunFolder:
    """Paths of one run.

    Args:
        root: The folder; made when it does not exist.
    """

    def __init__(self, root: Path) -> None:
        """Name the files; nothing is created yet."""
        self.root = root
        self.config = root / "config.toml"
        self.metrics = root / "metrics.jsonl"
        self.manifest = root / "manifest.json"
        self.weights = root / "weights"
        self.prompts = root / "prompts.jsonl"
        self.samples = root / "samples.jsonl"
        self.phases = root / "phases.jsonl"
        self.plot = root / "reward.png"
        self.logs = root / "logs"
        self.checkpoints = root / "checkpoints"
        self.model = root / "model"
        self.lock = root / "lock"

    @property
    def holds_a_run(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists() or self.checkpoints.exists()

    def begin(self) -> Path | None:
        """Make the folder for a fresh run.

        Returns:
            Where an older run was moved to, or None if there was none.

        Raises:
            PipelineError: The older run is still going on.
        """
        moved = None
        if self.holds_a_run:
            moved = self._aside()
            with self.held():
                self.root.rename(moved)
            logger.info("moved the run that was here to %s", moved)
        self._make()
        return moved

    def _aside(self) -> Path:
        stamp = datetime.fromtimestamp(self.root.stat().st_mtime, tz=UTC).strftime("%Y%m%d-%H%M%S")
        moved = self.root.with_name(f"{self.root.name}.{stamp}")
        suffix = 1
        while moved.exists():
            suffix += 1
            moved = self.root.with_name(f"{self.root.name}.{stamp}-{suffix}")
        return moved

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other run out of the folder for the length of the block.

        The lock is the kernel's: it goes with this process, however that ends.

        Raises:
            PipelineError: Another process runs here; names it.
        """
        with self.lock.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise PipelineError(
                    "a run is going on in this folder",
                    where=str(self.root),
                    seen=f"{file.read().strip()} holds {self.lock.name}",
                    expected="one run at a time",
                    fix="end that run, or set another pipeline.run_dir",
                ) from error
            except OSError as error:
                logger.warning("%s cannot be locked, see to it that one run uses it at a time: %s", self.root, error)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def reopen(self) -> None:
        """Check that the folder holds a run that can be resumed.

        Raises:
            ResumeError: It does not exist or no run has begun in it.
        """
        if not self.root.is_dir() or not self.holds_a_run:
            raise ResumeError(
                "not a run folder",
                where=str(self.root),
                seen=_listing(self.root),
                expected="config.toml and checkpoints/, as `vime-grpo train` writes them",
                fix="give the folder that the earlier run printed as its run folder",
            )
        self._make()

    def _make(self) -> None:
        for folder in (self.root, self.logs, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)


def _listing(folder: Path) -> str:
    if not folder.exists():
        return "nothing: the folder does not exist"
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else "an empty folder"
