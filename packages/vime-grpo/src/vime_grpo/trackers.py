"""Where metrics go besides the metrics file: TensorBoard and Weights & Biases.

The metrics file is the record and is always written; a tracker shows the same numbers elsewhere. Each is an extra of
this package and is imported only when the configuration asks for it::

    pip install 'vime-grpo[tensorboard]'
    pip install 'vime-grpo[wandb]'

A tracker that cannot be opened ends the run before anything is generated: finding out after a night that nothing was
logged is worse. On a resume both continue the run's own record. TensorBoard forgets the steps that are run again;
Weights & Biases keeps the values that it got first.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vime_grpo.errors import TrackerError

if TYPE_CHECKING:
    from vime_grpo.config import RunConfig

#: Seconds that Weights & Biases may take to begin a run.
WANDB_DEADLINE_S = 90.0


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step.

        Args:
            step: Number of the step; increases.
            metrics: Numbers by name; may hold NaN.
        """

    def close(self) -> None:
        """Write what is left and end. May be called again."""


class TensorBoardTracker:
    """Writes event files for TensorBoard, every metric as a scalar.

    Args:
        folder: Folder of the event files.
        resume_step: Continue after this step; what was written of later ones is hidden.

    Raises:
        TrackerError: The package tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        """Open an event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases; its own settings (WANDB_API_KEY, WANDB_MODE, ...) apply.

    Args:
        folder: The run folder. The identity of the run is kept there, so that a resume continues the same run.
        project: The project.
        name: The run's name; None takes the folder's.
        config: The run's configuration as plain values, shown beside it.
        resume_step: Continue the folder's run; None begins a new one.

    Raises:
        TrackerError: The package wandb is not installed, or the run cannot be begun.
    """

    def __init__(
        self, folder: Path, *, project: str, name: str | None, config: Mapping[str, Any], resume_step: int | None = None
    ) -> None:
        """Begin or continue the run."""
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from error
        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / "wandb-run-id"
        if resume_step is None or not identity.is_file():
            identity.write_text(secrets.token_hex(8), encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name or folder.name,
                id=identity.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(init_timeout=WANDB_DEADLINE_S, console="off"),
            )
        except wandb.Error as error:
            raise TrackerError(
                "Weights & Biases cannot begin the run",
                where=f"tracking.wandb_project = {project!r}",
                seen=f"{type(error).__name__}: {error}",
                fix="log in (wandb login), set WANDB_MODE=offline, or turn tracking.wandb off",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()


def open_trackers(config: RunConfig, run_folder: Path, resume_step: int | None) -> list[Tracker]:
    """Open the trackers that a configuration asks for.

    Args:
        config: The configuration.
        run_folder: The run folder.
        resume_step: Continue after this step; None for a fresh run.

    Returns:
        The trackers; whoever gets them closes them. None are open when an error is raised.

    Raises:
        TrackerError: A tracker is not installed or cannot begin; the text names the extra to install.
    """
    section = config.tracking
    trackers: list[Tracker] = []
    try:
        if section.tensorboard:
            trackers.append(TensorBoardTracker(run_folder / "tensorboard", resume_step=resume_step))
        if section.wandb:
            trackers.append(
                WandbTracker(
                    run_folder,
                    project=section.wandb_project or "",
                    name=section.wandb_name,
                    config=config.model_dump(mode="json", exclude_none=True),
                    resume_step=resume_step,
                )
            )
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _missing(extra: str, error: ImportError) -> TrackerError:
    return TrackerError(
        f"the package {extra} is not installed",
        where=f"tracking.{extra}",
        seen=str(error),
        fix=f"pip install 'vime-grpo[{extra}]', or turn tracking.{extra} off",
    )
