"""The trainer of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vime_megatron.batch import TokenLoss, TrainSequence
from vime_megatron.config import TrainerConfig

if TYPE_CHECKING:
    from vime_sync import WeightSource


@dataclass(frozen=True)
class StepMetrics:
    """What one optimiser step did, the same on every rank.

    Attributes:
        loss: The injected loss, summed over the global batch.
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate of this update.
        metrics: The loss's own sums.
        tokens: Tokens of the global batch, prompts included.
        seconds: Wall time of the step on this rank.
        step: Updates done so far, this one included.
    """

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]
    tokens: int
    seconds: float
    step: int


class MegatronTrainer:
    """One rank of a Megatron-Core trainer; no launcher and no Ray inside.

    Args:
        config: The same on every rank.
        rank: This process's rank, 0-based.
        world_size: Number of ranks.
        init_method: ``torch.distributed`` rendezvous, such as ``tcp://127.0.0.1:29500``; not needed for one rank.
    """

    def __init__(
        self, config: TrainerConfig, *, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        """Build the model and the optimiser."""
        raise NotImplementedError

    def step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> StepMetrics:
        """Do one optimiser step on the global batch (the same on every rank)."""
        raise NotImplementedError

    def logprobs(self, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
        """Return log-probabilities ``[S]`` of this rank's shard by global index; element 0 is 0."""
        raise NotImplementedError

    def source(self) -> WeightSource:
        """Return this rank's weights as vime-sync regions of the long-lived parameter buffers."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Publish a checkpoint at ``folder``, atomically."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Continue exactly from a checkpoint."""
        raise NotImplementedError

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the process group; the object is not usable afterwards."""
        raise NotImplementedError
