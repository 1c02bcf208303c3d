"""What can be found wrong before anything expensive starts.

Ray, the engines and the trainer take the better part of a minute to start. Everything that a look at the files can tell
is told first: an architecture that the trainer does not know, data that cannot be read, a disk without room.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vime_grpo import RunConfig
from vime_megatron import check_model
from vime_rollout import DataConfig, Encoder, load_filter, load_generate, load_source, open_data_source

from vime_integration.disk import FIX, disk_need
from vime_integration.errors import BundleError, PipelineError
from vime_integration.needs import GIB
from vime_integration.translate import data_config, evaluation_data_config


def check_before_start(config: RunConfig, resume: Path | None = None) -> None:
    """Check the model folder, the data, code of the user's own, the router and the disk.

    Args:
        config: The run.
        resume: The run folder that it continues; None for a fresh run.

    Raises:
        ModelError: The folder is missing, damaged or of an unsupported architecture.
        DataError: The data is missing, empty, or a line or row of it is broken (it is named).
        PipelineError: A package that the configuration asks for is not installed.
        BundleError: The disk cannot hold the checkpoints that the run will write.
    """
    check_model(config.model.path)
    check_data(config)
    check_evaluation(config)
    _load_own_code(config)
    if config.engine.router and find_spec("vllm_router") is None:
        raise PipelineError(
            "vllm-router is not installed",
            where="engine.router",
            expected="the package vllm-router",
            fix="pip install 'vime-rollout[router]', or set engine.router = false: requests are then dealt out",
        )
    _check_disk(config, resume)


def check_data(config: RunConfig) -> str:
    """Open what the run trains on.

    Returns:
        What it is, for people.

    Raises:
        RolloutError: It is missing, empty or broken, or the class cannot be found.
    """
    data = config.data
    if data.kind == "custom":
        return _own_source(config, data.source or "", data.options)
    return f"{data.kind} with {_open(data_config(config))} prompts an epoch"


def check_evaluation(config: RunConfig) -> str:
    """Open what the run evaluates on, if it does.

    Returns:
        What it is, for people; empty where nothing is evaluated.

    Raises:
        RolloutError: It is missing, empty or broken, or the class cannot be found.
    """
    section = config.evaluation
    if not section.enabled:
        return ""
    if section.kind == "custom":
        return f"{section.size} prompts of {_own_source(config, section.source or '', section.options)}"
    return f"{section.kind} with {_open(evaluation_data_config(config))} prompts"


def _open(data: DataConfig) -> int:
    """Open data and return its length; token counts are the rollout's to check, which has the tokenizer."""
    return len(open_data_source(dataclasses.replace(data, max_prompt_tokens=None)))


def _own_source(config: RunConfig, path: str, options: dict[str, Any]) -> str:
    """Make a source as the rollout will make it, with the tokenizer that it may ask for."""
    load_source(path, options, encoder=Encoder(config.model.path))
    return path


def _load_own_code(config: RunConfig) -> None:
    """Find the functions that the configuration names by their dotted paths; one that cannot be called is told here."""
    if config.rollout.filter:
        load_filter(config.rollout.filter, config.rollout.filter_options)
    if config.rollout.generate:
        load_generate(config.rollout.generate, config.rollout.generate_options)


def _check_disk(config: RunConfig, resume: Path | None) -> None:
    need = disk_need(config, resume)
    if not need.fits:
        raise BundleError(
            "the disk cannot hold what the run will write",
            where=str(need.folder),
            seen=f"{need.free / GIB:.2f} GiB free",
            expected=need.text(),
            fix=FIX,
        )
