"""The configuration of a run: typed sections, read from TOML, checked as a whole. Needs no torch.

::

    from vime_grpo.config import load_config

    config = load_config("run.toml", ["rollout.batch_size=64"])

The pages of this package: `generation`, `training` and `watching` hold the sections with a doc on every
field, `run` composes them and ties them together, `model_folder` checks the layout against the model, `toml` and
`schema` read files and overrides, `load` is the door, `reference` prints the docs.
"""

from vime_grpo.config.generation import DataSection, EngineSection, ModelSection, RewardSection, RolloutSection
from vime_grpo.config.load import config_from_dict, load_config, save_config
from vime_grpo.config.model_folder import check_model_folder
from vime_grpo.config.reference import config_reference
from vime_grpo.config.run import RunConfig
from vime_grpo.config.toml import dump_toml
from vime_grpo.config.training import (
    AlgorithmSection,
    CheckpointSection,
    PipelineSection,
    SyncSection,
    TrainerSection,
)
from vime_grpo.config.watching import EvaluationSection, GuardsSection, TrackingSection

__all__ = [
    "AlgorithmSection",
    "CheckpointSection",
    "DataSection",
    "EngineSection",
    "EvaluationSection",
    "GuardsSection",
    "ModelSection",
    "PipelineSection",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "SyncSection",
    "TrackingSection",
    "TrainerSection",
    "check_model_folder",
    "config_from_dict",
    "config_reference",
    "dump_toml",
    "load_config",
    "save_config",
]
