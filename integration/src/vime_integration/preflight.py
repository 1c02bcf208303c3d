"""What can be found wrong before anything expensive starts.

Ray, the engines and the trainer take the better part of a minute to start. Everything that a look at the files can tell
is told first: an architecture that the trainer does not know, data that cannot be read, a disk without room.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from vime_grpo import RunConfig
from vime_megatron import check_model
from vime_rollout import load_filter, load_generate, load_source, open_data_source

from vime_integration.errors import BundleError
from vime_integration.translate import data_config, evaluation_data_config

#: A bundle holds the weights, float32 master weights and two moments: at most this many times the model folder.
BUNDLE_FACTOR = 7


def check_before_start(config: RunConfig) -> None:
    """Check the model folder, the data and the disk.

    Raises:
        ModelError: The folder is missing, damaged or of an unsupported architecture.
        DataError: The data is missing, empty, or a line or row of it is broken (it is named).
        BundleError: The disk cannot hold the checkpoints that the run will keep.
    """
    check_model(config.model.path)
    # Token counts are the rollout's to check: it has the tokenizer, which takes seconds to load.
    if config.data.kind != "custom":
        open_data_source(dataclasses.replace(data_config(config), max_prompt_tokens=None))
    _load_own_code(config)
    if config.evaluation.enabled:
        open_data_source(dataclasses.replace(evaluation_data_config(config), max_prompt_tokens=None))
    _check_disk(config)


def _load_own_code(config: RunConfig) -> None:
    """Find every function that the configuration names by its dotted path; one that cannot be called is told here."""
    if config.rollout.filter:
        load_filter(config.rollout.filter, config.rollout.filter_options)
    if config.rollout.generate:
        load_generate(config.rollout.generate, config.rollout.generate_options)
    if config.data.kind == "custom":
        load_source(config.data.source or "", config.data.options)


def _check_disk(config: RunConfig) -> None:
    model = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))
    needed = model * BUNDLE_FACTOR * (config.checkpoint.keep + 1)
    root = _existing(config.pipeline.run_dir)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise BundleError(
            "the disk cannot hold the checkpoints",
            where=str(config.pipeline.run_dir),
            seen=f"{free / 2**30:.2f} GiB free",
            expected=f"about {needed / 2**30:.2f} GiB for {config.checkpoint.keep} checkpoints and one being written",
            fix="free space, set checkpoint.keep lower, or choose another pipeline.run_dir",
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
