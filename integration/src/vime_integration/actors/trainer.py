"""One trainer rank: a MegatronTrainer, the publisher of its weights, and the order of one training phase.

A phase gets the rows of a whole rollout (the same object on every rank, from Ray's object store). Log-probabilities
that the loss needs besides its own forward pass are computed first, for every update of the rollout and before any of
them changes a weight; each rank keeps those of its own share, so nothing is sent around.

With one update a rollout the policy that is trained still is the one that sampled, so the loss takes its own
log-probabilities for the old ones and the extra forward pass is left out; the difference to the engine's is measured
either way.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from vime_grpo import PolicyLoss, RunConfig
from vime_megatron import MegatronTrainer, OptimizerSettings, StepMetrics, TrainerConfig, TrainSequence
from vime_sync import Publisher, WeightSource, release_shared

from vime_integration.batches import RolloutBatch, sequences_of
from vime_integration.cluster import log_to_file
from vime_integration.placement import Seat
from vime_integration.staleness import WithOnPolicyDifference

logger = logging.getLogger(__name__)

#: What leaves the device for the engines' sake.
OFFLOADED: tuple[Literal["gradients", "optimizer"], ...] = ("gradients", "optimizer")
#: Of a device, that is left for the batches of engines, whose caches are allocated already.
ENOUGH_GIB = 8.0


@dataclass(frozen=True)
class TrainReport:
    """What one training phase did; the same on every rank, but for memory and times.

    Attributes:
        updates: Metrics of each optimiser step, in order.
        peak_rss_gib: Largest resident memory of this process so far, GiB.
        memory: This rank's memory by phase, GiB, as `MegatronTrainer.memory` names it.
        spans: For the timeline, lane, phase, begin and end by ``time.monotonic``: log-probabilities, where any were
            computed beside the loss's own, optimiser steps, and what made their weights readable.
    """

    updates: tuple[StepMetrics, ...]
    peak_rss_gib: float
    memory: dict[str, float]
    spans: tuple[tuple[str, str, float, float], ...]


def trainer_config(config: RunConfig) -> TrainerConfig:
    """Translate the run's configuration into the trainer's own."""
    section = config.trainer
    total = config.pipeline.steps * config.algorithm.steps_per_rollout
    return TrainerConfig(
        model=config.model.path,
        tensor_parallel=section.tensor_parallel,
        pipeline_parallel=section.pipeline_parallel,
        context_parallel=section.context_parallel,
        expert_parallel=section.expert_parallel,
        sequence_parallel=section.sequence_parallel,
        dtype=section.dtype,
        max_tokens_per_microbatch=section.max_tokens_per_microbatch,
        max_sequence_length=config.rollout.max_context_tokens,
        temperature=config.rollout.temperature,
        logprob_chunk_tokens=section.logprob_chunk_tokens,
        head_dtype=config.model.head_dtype,
        recompute=section.activation_recompute,
        seed=section.seed,
        # Both only tell where the weights lie on a CPU; on a GPU they are device memory either way.
        shared_weights=config.sync.mode != "copy",
        timeout_s=section.step_deadline_s,
        optimizer=OptimizerSettings(
            lr=section.learning_rate,
            min_lr=section.min_learning_rate,
            schedule=section.lr_schedule,
            warmup_steps=section.warmup_steps,
            decay_steps=None if section.lr_schedule == "constant" else total,
            beta1=section.adam_beta1,
            beta2=section.adam_beta2,
            eps=section.adam_eps,
            weight_decay=section.weight_decay,
            clip_grad=section.clip_grad,
            distributed=section.distributed_optimizer,
            loss_scale=section.loss_scale,
            loss_scale_window=section.loss_scale_window,
        ),
    )


class TrainerActor:
    """Owns one rank.

    Args:
        config: The run's configuration.
        rank: 0-based.
        seat: Where this rank runs.
        publish: How weights are published: ``transport``, as `vime_sync.choose_transport` chose it, and ``options``.
        log: This process's log file.
    """

    def __init__(self, config: RunConfig, rank: int, seat: Seat, publish: Mapping[str, Any], log: Path) -> None:
        """Settle the process; ``start`` builds the model."""
        for name in seat.removed:  # before anything looks at devices
            os.environ.pop(name, None)
        log_to_file(log)
        torch.set_num_threads(seat.threads)
        self._config = config
        self._rank = rank
        self._publish = publish
        self._device_index = seat.local_indices[0] if seat.local_indices else 0
        self._trainer: MegatronTrainer | None = None
        self._publisher: Publisher | None = None
        self._reference: dict[str, Tensor] = {}
        self._gave_room = False

    def start(
        self, init_method: str, checkpoint: Path | None = None, *, make_room: bool = False, offload: bool = False
    ) -> dict[str, Any]:
        """Build the model, load its weights and open the publisher; every rank must be asked at the same time.

        Args:
            init_method: Rendezvous of the ranks.
            checkpoint: What ``save`` wrote, to continue from.
            make_room: Give what is unused back to the device in the end, so that engines find it free.
            offload: And leave gradients and optimiser on the host.

        Returns:
            The manifest of this rank's weights, JSON values.

        Raises:
            TrainerError: The model folder, the layout or the checkpoint cannot be used.
        """
        config = self._config
        world = config.trainer.world_size
        self._trainer = MegatronTrainer(
            trainer_config(config),
            rank=self._rank,
            world_size=world,
            init_method=init_method if world > 1 else None,
            device_index=self._device_index,
        )
        if checkpoint is not None:
            self._trainer.load(checkpoint)
            logger.info("rank %d continues after optimiser step %d", self._rank, self._trainer.state.step)
        source: WeightSource = self._trainer.source()
        if config.algorithm.kl_coef > 0 and config.algorithm.kl_target == "reference":
            self._reference = {name: buffer.detach().to("cpu", copy=True) for name, buffer in source.buffers.items()}
        self._publisher = Publisher(source, digest=config.sync.digest, **self._publish)
        self._publisher.stage(0)  # an engine that runs on this memory finds a whole version when it starts
        if make_room:
            self.make_room(offload, enough_gib=math.inf)
        logger.info("rank %d of %d holds %d buffers", self._rank, world, len(source.buffers))
        return self._publisher.manifest()

    def train(self, batch: RolloutBatch, version: int) -> TrainReport:
        """Run the optimiser steps of one rollout, and make their weights readable to the engines.

        Args:
            batch: The rollout's rows, the same on every rank.
            version: What the weights are afterwards; nothing is committed by this.

        Raises:
            BatchError: A row cannot be used; nothing has happened.
            GradientError: A loss or gradient is not finite; weights and optimiser are as before that update.
        """
        assert self._publisher is not None
        algorithm, reuse = self._config.algorithm, len(batch.updates) == 1
        loss = WithOnPolicyDifference(PolicyLoss.from_config(algorithm, reuse_current=reuse))
        with self._publisher.writing(version):
            began = time.monotonic()
            prepared = self._prepared(batch, recompute=not reuse and algorithm.old_logprobs == "recompute")
            trains = time.monotonic()
            updates = tuple(self._ready().step(sequences, loss) for sequences in prepared)
            stages = time.monotonic()
        ended = time.monotonic()
        spans = (
            ("trainer", "logprobs", began, trains),
            ("trainer", "train", trains, stages),
            ("sync", "stage", stages, ended),
        )
        memory = self._ready().memory()
        return TrainReport(updates, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, memory, spans)

    def _prepared(self, batch: RolloutBatch, *, recompute: bool) -> list[list[TrainSequence]]:
        """Return the sequences of each update, with the log-probabilities that the loss needs besides its own."""
        trainer = self._ready()
        prepared = []
        for rows in batch.updates:
            more: dict[str, Mapping[int, Tensor]] = {}
            plain = sequences_of(rows)
            if recompute:
                more["old_logprob"] = trainer.logprobs(plain)
            if self._reference:
                with self._reference_weights():
                    more["ref_logprob"] = trainer.logprobs(plain)
            prepared.append(sequences_of(rows, **more))
        return prepared

    def make_room(self, offload: bool, enough_gib: float = ENOUGH_GIB) -> dict[str, Any]:
        """Give device memory to the engines: what the allocator keeps unused and, if asked, state that can leave.

        The weights stay where they are: engines may run on them, and a sync reads them.

        Args:
            offload: Drop gradients and move the optimiser's state to the host.
            enough_gib: Where so much of the device is free and nothing is to be moved, nothing is done: the next step
                would have to ask the driver for all of it again.

        Returns:
            What was moved, nothing where it was away already, and ``kept_gib``, what the allocator holds now (0 on a
            CPU); nothing at all where nothing was done.
        """
        kinds = OFFLOADED if offload and not self._gave_room else ()
        if not kinds and self._ready().memory().get("device_free_gib", 0.0) >= enough_gib:
            return {}
        self._gave_room = self._gave_room or offload
        moved = self._ready().offload(kinds).to_dict()  # which empties the allocator's cache whatever it moves
        return moved | {"kept_gib": self._ready().memory().get("device_reserved_gib", 0.0)}

    def take_room(self) -> dict[str, Any]:
        """Take back what ``make_room`` gave away, if it did."""
        kinds = OFFLOADED if self._gave_room else ()
        self._gave_room = False
        return self._ready().onload(kinds).to_dict()

    def memory(self) -> dict[str, float]:
        """Return this rank's memory, GiB, as `MegatronTrainer.memory` names it."""
        return self._ready().memory()

    def stage(self, version: int) -> None:
        """Make the present weights readable to the engines under ``version``; nothing is committed by this."""
        assert self._publisher is not None
        self._publisher.stage(version)

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint; every rank must be asked at the same time."""
        if self._gave_room:  # a run that was stopped before its first step
            self.take_room()
        self._ready().save(folder)

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; every rank must be asked at the same time."""
        self._ready().export_hf(folder)

    def pids(self) -> list[int]:
        """Return this process's id."""
        return [os.getpid()]

    def stop(self) -> None:
        """Give back what outlives the process: shared memory and process groups."""
        if self._publisher is not None:
            self._publisher.close(force=True)  # engines were stopped first, or the run has failed
            self._publisher = None
        release_shared()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Put the weights that training started from into the trainer's buffers for the length of the block."""
        buffers = self._ready().source().buffers
        present = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        try:
            for name, buffer in buffers.items():
                buffer.copy_(self._reference[name])
            yield
        finally:
            for name, buffer in buffers.items():
                buffer.copy_(present[name])

    def _ready(self) -> MegatronTrainer:
        assert self._trainer is not None, "start() comes first"
        return self._trainer
