"""The trainer of one rank: the global batch in, one optimiser step, weights as regions or files out.

Nothing here launches processes: a caller starts ``world_size`` of them (Ray, torchrun, spawn) and gives each its rank.

A step is: plan the batch (same plan on every rank), run Megatron's forward-backward schedule over this rank's packed
micro-batches, let Megatron reduce the gradients, refuse the step if anything is not finite, set the learning rate,
step. Losses and gradients are sums throughout; the injected loss holds the normaliser.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_megatron.batch import BatchPlan, TokenLoss, TrainSequence, check_batch, plan_batch
from vime_megatron.config import TrainerConfig
from vime_megatron.errors import TrainerError
from vime_megatron.families import load_family
from vime_megatron.families.mapping import checkpoint_names, placements
from vime_megatron.offload import MOVABLE, Movable, MoveReport, Parking
from vime_megatron.platform import select_platform

if TYPE_CHECKING:
    from vime_sync import WeightSource

    from vime_megatron.kernels import Kernels
    from vime_megatron.logprobs import VocabShard
    from vime_megatron.microbatch import MicroBatch
    from vime_megatron.model.core_attention import CoreAttention

_log = logging.getLogger(__name__)


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


@dataclass
class TrainerState:
    """What a checkpoint continues from, besides weights and optimiser.

    Attributes:
        step: Optimiser updates done.
    """

    step: int = 0


class MegatronTrainer:
    """One rank of a Megatron-Core trainer; no launcher and no Ray inside.

    Args:
        config: The same on every rank.
        rank: This process's rank, 0-based.
        world_size: Number of ranks.
        init_method: ``torch.distributed`` rendezvous, such as ``tcp://127.0.0.1:29500``; not needed for one rank.
        device_index: Which visible GPU this rank uses.

    Raises:
        ModelError: The folder is not a supported model, or does not divide by the parallel sizes.
        PlatformError: The device that was asked for is not there.
        TrainerError: The process already holds a trainer, or the sizes do not fit the world.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        init_method: str | None = None,
        device_index: int = 0,
    ) -> None:
        """Join the group, build the model, load its weights, make the optimiser."""
        self.config = config
        self.state = TrainerState()
        self._family, self.shape = load_family(config.model)
        self.max_length = config.max_sequence_length or self.shape.max_positions
        self._platform = select_platform(config.device, device_index)
        self._parking = Parking(self._platform.device)
        self._source_given = False
        with self._platform.active():
            self._build(rank, world_size, init_method)

    def _build(self, rank: int, world_size: int, init_method: str | None) -> None:
        from vime_megatron.kernels import select_kernels
        from vime_megatron.model.core_attention import choose_attention, select_core_attention
        from vime_megatron.model.policy import DTYPES
        from vime_megatron.parallel import connect

        config, shape, platform = self.config, self.shape, self._platform
        dtype = DTYPES[config.dtype]
        attention = choose_attention(config.attention, platform.device, dtype)
        kernels = select_kernels(config.kernels, platform.device, dtype)
        self.choices = {"device": str(platform.device), "attention": attention, "kernels": kernels.name}
        _log.info("rank %d: %s", rank, ", ".join(f"{name} {choice}" for name, choice in self.choices.items()))
        self.topology = connect(
            config, shape, rank=rank, world_size=world_size, init_method=init_method, backend=platform.backend
        )
        try:
            self._build_model(select_core_attention(attention, platform.device, dtype), kernels, dtype)
        except BaseException:
            self.topology.close()  # a trainer that could not be built does not hold the process's groups
            raise

    def _build_model(self, core: CoreAttention, kernels: Kernels, dtype: torch.dtype) -> None:
        from vime_megatron.forward import Forward
        from vime_megatron.model.packing import inverse_frequencies
        from vime_megatron.model.policy import build_policy

        config, shape, layout = self.config, self.shape, self.topology.layout
        self._platform.seed(config.seed)
        self._frequencies = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self.model = build_policy(
            shape,
            config,
            core_attention=core,
            kernels=kernels,
            first_stage=layout.first_stage,
            last_stage=layout.last_stage,
        )
        self._placed = placements(self._family.rules, shape, layout)
        self.params: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self._load_weights()
        self._wrap(dtype)
        self.model.train()
        self._forward = Forward(
            self.model,
            self.ddp,
            shard=self._vocab_shard(kernels),
            temperature=config.temperature,
            max_tokens=config.max_tokens_per_microbatch,
        )

    def _load_weights(self) -> None:
        from vime_megatron.weights.random import draw_weights
        from vime_megatron.weights.reader import load_folder

        for param in self.params.values():
            param.data.zero_()  # rows that only pad the vocabulary are never written
        if self.config.random_weights:
            draw_weights(self.params, self._placed, seed=self.config.seed, std=self.shape.init_std)
        else:
            names = checkpoint_names(self._family.rules, self.shape)
            load_folder(self.config.model, self.params, self._placed, names)

    def _wrap(self, dtype: torch.dtype) -> None:
        from vime_megatron.optim import build_optimizer, gradient_buffers, wrap_data_parallel
        from vime_megatron.weights.buffers import flatten_parameters, locate

        settings = self.config.optimizer
        split = {place.param for place in self._placed if place.split}
        for name, param in self.params.items():
            param.tensor_model_parallel = name in split  # type: ignore[attr-defined]  # Megatron's gradient norm asks
        buffers = [] if settings.distributed else flatten_parameters(self.params)
        self.ddp = wrap_data_parallel(self.model, settings)
        if settings.distributed:
            buffers = [buffer.param_data for buffer in gradient_buffers(self.ddp)]
        self._buffers, self._slots = locate(self.params, buffers)
        self.optimizer, self.scheduler = build_optimizer(self.ddp, settings, dtype)

    def _vocab_shard(self, kernels: Kernels) -> VocabShard:
        from vime_megatron.logprobs import VocabShard

        layout = self.topology.layout
        each = -(-self.shape.vocab // layout.tp_size)
        start = layout.tp_rank * each
        rows = max(0, min(each, self.shape.vocab - start))
        return VocabShard(start, rows, self.topology.tp_group, self.config.logprob_chunk_tokens, kernels)

    def step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> StepMetrics:
        """Do one optimiser step on the global batch.

        Args:
            sequences: The global batch, the same on every rank.
            loss: Called once per packed micro-batch; see :data:`~vime_megatron.TokenLoss`.

        Returns:
            Metrics of the whole batch, the same on every rank.

        Raises:
            BatchError: The batch cannot be used; nothing has happened.
            GradientError: The loss or a gradient is not finite; weights and optimiser are as before.
        """
        from vime_megatron.update import apply_update, check_finite, gradient_norm

        started = time.perf_counter()
        self._at_home("step", *MOVABLE)
        with self._platform.active():
            plan = self._plan(sequences)
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = self._microbatches(sequences, plan, every_token=False)
            sums = self._forward.train(batches, plan.count, loss)
            norm_on_device = gradient_norm(self.optimizer, self._platform.device)  # queued before anything waits
            totals = self._total(sums)
            norm = float(norm_on_device)
            check_finite(self.ddp, self.topology, loss=totals["loss"], norm=norm)
            self.scheduler.step(increment=1)
            lr = float(self.optimizer.param_groups[0]["lr"])
            limit = self.config.optimizer.clip_grad
            apply_update(self.optimizer, norm=norm, limit=limit, device=self._platform.device)
            self._platform.synchronize()
        self.state.step += 1
        return StepMetrics(
            loss=totals.pop("loss"),
            grad_norm=norm,
            lr=lr,
            metrics=totals,
            tokens=sum(len(sequence) for sequence in sequences),
            seconds=time.perf_counter() - started,
            step=self.state.step,
        )

    def logprobs(self, sequences: Sequence[TrainSequence]) -> dict[int, Tensor]:
        """Compute log-probabilities under the current weights, at the configured temperature.

        Args:
            sequences: The global batch, the same on every rank; weights are ignored, each token gets a value.

        Returns:
            For each sequence of this rank's data-parallel shard, by global index: float32 ``[S]`` on the CPU. Element
            ``i`` is the log-probability of token ``i`` after those before it; element 0 is 0.

        Raises:
            BatchError: The batch cannot be used.
        """
        self._at_home("compute log-probabilities", "weights")
        with self._platform.active():
            plan = self._plan(sequences)
            results = self._forward.score(self._microbatches(sequences, plan, every_token=True), plan.count)
            results = self.topology.from_last_stage(results)
        return {index: values for scores in results for index, values in scores.items()}

    def source(self) -> WeightSource:
        """Describe this rank's weights as regions of the long-lived parameter buffers; nothing is copied.

        Returns:
            A vime-sync source. Its buffers are the ones that the optimiser writes, for the trainer's whole life.
        """
        from vime_megatron.weights.regions import weight_source

        self._at_home("describe the weights", "weights")
        self._source_given = True
        return weight_source(self._placed, self._buffers, self._slots, rank=self.topology.rank)

    def offload(self, what: Sequence[Movable] = ("gradients", "optimizer")) -> MoveReport:
        """Make room on the device: move state of this rank to pinned host memory.

        Args:
            what: Kinds of state. ``gradients`` are dropped (every step starts by clearing them), ``optimizer`` is
                copied; ``weights`` are copied too, and only while :meth:`source` has not given their addresses out.

        Returns:
            Bytes moved, bytes that the device's driver reports as freed, and the time.

        Raises:
            TrainerError: A kind is unknown or away already, or the weights' addresses are in use; nothing was moved.
        """
        from vime_megatron.offload import check_kinds

        kinds = check_kinds(what, self._parking.away, leaving=True)
        if "weights" in kinds and self._source_given:
            raise TrainerError(
                "the weights cannot leave the device",
                seen="source() has given out their addresses",
                fix="offload gradients and optimizer only",
            )
        with self._platform.active():
            self.optimizer.zero_grad()
            groups = self._movable()
            return self._parking.out({kind: groups[kind] for kind in kinds})

    def onload(self, what: Sequence[Movable] | None = None) -> MoveReport:
        """Bring state back to the device.

        Args:
            what: Kinds of state; ``None`` brings all that is away.

        Returns:
            Bytes moved, bytes taken on the device (negative), and the time.

        Raises:
            TrainerError: A kind is unknown or not away; nothing was moved.
        """
        from vime_megatron.offload import check_kinds

        kinds = check_kinds(self._parking.away if what is None else what, self._parking.away, leaving=False)
        with self._platform.active():
            return self._parking.back(kinds)

    def _movable(self) -> dict[str, list[Tensor]]:
        """Collect this rank's state by kind; float32 weights are their own masters and count as weights."""
        from vime_megatron.optim import gradient_buffers, optimizer_tensors

        return {
            "gradients": [buffer.grad_data for buffer in gradient_buffers(self.ddp)],
            "optimizer": [tensor for tensor in optimizer_tensors(self.optimizer) if not self.owns(tensor)],
            "weights": list(self._buffers.values()),
        }

    def _at_home(self, action: str, *kinds: str) -> None:
        """Refuse an action whose state is on the host."""
        away = [kind for kind in kinds if kind in self._parking.away]
        if away:
            raise TrainerError(
                f"cannot {action}: state is offloaded",
                where=f"rank {self.topology.rank}",
                seen=", ".join(away),
                expected="on the device",
                fix="call onload() first",
            )

    def save(self, folder: Path | str) -> None:
        """Publish a checkpoint at ``folder``: weights, optimiser, schedule, random state and step counter.

        It is written beside ``folder`` and renamed when it is complete and on disk; until then a checkpoint that is
        there stays valid. Every rank must call it, with the same folder on a shared file system.

        Args:
            folder: Where the checkpoint will be.

        Raises:
            CheckpointError: A rank could not write (on every rank); nothing was published.
        """
        from vime_megatron.checkpoint import save_checkpoint

        self._at_home("save", "optimizer", "weights")
        with self._platform.active():
            save_checkpoint(self, Path(folder))

    def load(self, folder: Path | str) -> None:
        """Continue from a checkpoint: exactly in the layout that wrote it, up to rounding in another.

        Another layout draws new random numbers, and cannot read the shards of a distributed optimiser.

        Args:
            folder: What :meth:`save` published.

        Raises:
            CheckpointError: There is no valid checkpoint, a file fails its checksum, or layout or model differ.
        """
        from vime_megatron.checkpoint import load_checkpoint

        self._at_home("load", "optimizer", "weights")
        with self._platform.active():
            load_checkpoint(self, Path(folder))

    def export_hf(self, folder: Path | str, *, max_file_bytes: int = 5 * 10**9) -> None:
        """Write the weights as a Hugging Face folder, with the source folder's configuration and tokenizer.

        Every rank must call it; rank 0 writes.

        Args:
            folder: Appears when it is complete; replaces one that is there.
            max_file_bytes: Largest safetensors file.

        Raises:
            CheckpointError: Rank 0 could not write (on every rank).
        """
        from vime_megatron.checkpoint import publish
        from vime_megatron.weights.writer import copy_companions, gather_tensors, write_tensors

        self._at_home("export", "weights")
        placed = [placements(self._family.rules, self.shape, layout) for layout in self.topology.layouts]
        tensors = gather_tensors(self.params, placed, rank=self.topology.rank, device=self._platform.device)

        def write(temporary: Path) -> None:
            if self.topology.rank == 0:
                write_tensors(temporary, tensors, max_file_bytes=max_file_bytes)
                copy_companions(self.config.model, temporary)
            else:
                for _nothing in tensors:
                    pass

        with self._platform.active():
            publish(self.topology, Path(folder), write)

    def close(self) -> None:
        """Leave the process groups; the trainer is not usable afterwards."""
        self.topology.close()

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is a view of the long-lived weight buffers."""
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == buffer.untyped_storage().data_ptr() for buffer in self._buffers.values())

    def _plan(self, sequences: Sequence[TrainSequence]) -> BatchPlan:
        check_batch(sequences, max_length=self.max_length, vocab_size=self.shape.vocab)
        return plan_batch(
            [len(sequence) for sequence in sequences],
            ranks=self.topology.dp_size,
            max_tokens=self.config.max_tokens_per_microbatch,
            cost=self.shape.forward_flops,
        )

    def _microbatches(
        self, sequences: Sequence[TrainSequence], plan: BatchPlan, *, every_token: bool
    ) -> Iterator[MicroBatch]:
        from vime_megatron.microbatch import build_microbatch

        for indices in plan.microbatches[self.topology.dp_rank]:
            yield build_microbatch(
                sequences,
                indices,
                inverse_frequencies=self._frequencies,
                device=self._platform.device,
                multiple=self.config.tensor_parallel if self.config.sequence_parallel else 1,
                every_token=every_token,
            )

    def _total(self, sums: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Add the micro-batches of all ranks, in rank order and double precision."""
        mine: dict[str, float] = {}
        named = [(name, value) for values in sums for name, value in values.items()]
        device = self._platform.device
        values_n = [value.to(device, torch.float64).reshape(()) for _name, value in named]
        numbers = torch.stack(values_n).tolist() if named else []  # one wait for the device, not one for each
        for (name, _value), number in zip(named, numbers, strict=True):
            mine[name] = mine.get(name, 0.0) + number
        totals: dict[str, float] = {"loss": 0.0}
        for theirs in self.topology.gather(mine if self.topology.counts_once else {}):
            for name, value in theirs.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals
