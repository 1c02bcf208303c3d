"""How much room a run needs on the disk of its folder, beside what lies there: held against it before anything starts.

What counts is what this run can write. With ``e`` checkpoints standing when it starts, the i-th of its saves is written
while ``min(keep, e + i - 1)`` others stand (the first beside all ``e``), for older ones go only after a newer one is
whole. A run that saves once needs room for one; a long one for ``keep`` and the one being written. A run that SIGTERM
stops saves no more often than one that goes on. After the last save the trained model is written.

An earlier run in the folder is moved aside, whole, and frees nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vime_grpo import RunConfig
from vime_megatron import ModelShape, check_model
from vime_megatron.memory import count_parameters

from vime_integration.bundle import BundleStore
from vime_integration.needs import GIB, WIDTHS
from vime_integration.run_folder import RunFolder

FIX = (
    "free space, lower checkpoint.keep, save less often (checkpoint.every, checkpoint.last), or choose another "
    "pipeline.run_dir"
)


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What a run will write beside what stands.

    Attributes:
        folder: The run folder, or the nearest of its parents that exists.
        free: Bytes that are free there.
        checkpoints: Most checkpoints at a time beyond those that stand, the one being written among them.
        checkpoint_bytes: Bytes of one.
        total: Bytes at the fullest moment, the trained model included where it is written then.
    """

    folder: Path
    free: int
    checkpoints: int
    checkpoint_bytes: int
    total: int

    @property
    def fits(self) -> bool:
        """Whether the disk holds it."""
        return self.total <= self.free

    def text(self) -> str:
        """Return what is needed, for people."""
        size = f"of {self.checkpoint_bytes / GIB:.2f} GiB"
        more = {0: "", 1: f"a checkpoint {size}, then "}
        saved = more.get(self.checkpoints, f"up to {self.checkpoints} checkpoints {size} at a time, then ")
        return f"about {self.total / GIB:.2f} GiB: {saved}the trained model"


def disk_need(config: RunConfig, resume: Path | None = None) -> DiskNeed:
    """Say what a run will need.

    Args:
        config: The run.
        resume: The run folder that it continues; None for a fresh run.

    Raises:
        ModelError: The model folder is missing, damaged or of an unsupported architecture.
    """
    standing = [] if resume is None else BundleStore(RunFolder(resume).checkpoints, keep=1).steps()
    shape = check_model(config.model.path)
    each, model = bundle_bytes(config, shape), count_parameters(shape) * WIDTHS[config.trainer.dtype]
    saves, keep = saves_left(config, standing[-1] if standing else 0), config.checkpoint.keep
    most = 0 if not saves else max(1, min(keep, len(standing) + saves - 1) + 1 - len(standing))
    grown = 0 if not saves else min(keep, len(standing) + saves) - len(standing)
    wanted = config.pipeline.run_dir if resume is None else resume
    folder = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
    total = max(most * each, grown * each + model)
    return DiskNeed(folder, shutil.disk_usage(folder).free, most, each, total)


def saves_left(config: RunConfig, done: int) -> int:
    """Return how many checkpoints a run writes after ``done`` steps, if nothing stops it."""
    section, last = config.checkpoint, config.pipeline.steps
    if done >= last:
        return 0
    regular = last // section.every - done // section.every if section.every else 0
    ends_with_one = section.every > 0 and last % section.every == 0
    return regular + (section.last and not ends_with_one)


def bundle_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of one resume bundle: weights, float32 masters where they differ, and two moments."""
    each = 12 if config.trainer.dtype == "float32" else 14
    return count_parameters(shape) * each
