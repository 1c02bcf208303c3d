"""Megatron-Core models and training for RL, from a Hugging Face folder and back."""

from vime_megatron.batch import TokenLoss, TrainSequence
from vime_megatron.checkpoint.handle import SaveHandle
from vime_megatron.config import OptimizerSettings, TrainerConfig
from vime_megatron.errors import (
    BatchError,
    CheckpointError,
    GradientError,
    ModelError,
    PlatformError,
    TrainerError,
)
from vime_megatron.families import check_model
from vime_megatron.families.shape import ModelShape
from vime_megatron.losses import sft_loss
from vime_megatron.metrics import StepMetrics
from vime_megatron.trainer import MegatronTrainer

__all__ = [
    "BatchError",
    "CheckpointError",
    "GradientError",
    "MegatronTrainer",
    "ModelError",
    "ModelShape",
    "OptimizerSettings",
    "PlatformError",
    "SaveHandle",
    "StepMetrics",
    "TokenLoss",
    "TrainSequence",
    "TrainerConfig",
    "TrainerError",
    "check_model",
    "sft_loss",
]
