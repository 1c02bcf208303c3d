"""The trainer of one rank: the global batch in, one optimiser step, weights as regions or files out.

Nothing here launches processes: a caller starts ``world_size`` of them (Ray, torchrun, spawn) and gives each its rank.

A step is: plan the batch (same plan on every rank), run Megatron's forward-backward schedule over this rank's packed
micro-batches, let Megatron reduce the gradients, refuse the step if anything is not finite, set the learning rate,
step. Losses and gradients are sums throughout; the injected loss holds the normaliser.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_megatron.batch import BatchPlan, TokenLoss, TrainSequence, check_batch, plan_batch
from vime_megatron.config import TrainerConfig
from vime_megatron.errors import ModelError, TrainerError
from vime_megatron.families import load_family
from vime_megatron.families.mapping import checkpoint_names, placements
from vime_megatron.loss_scale import LossScale
from vime_megatron.metrics import MemoryMeter, StepMetrics, TrainerState, add_up
from vime_megatron.offload import MOVABLE, Movable, MoveReport, Parking
from vime_megatron.platform import select_platform

if TYPE_CHECKING:
    from vime_sync import WeightSource

    from vime_megatron.checkpoint.handle import SaveHandle
    from vime_megatron.checkpoint.storage import Progress
    from vime_megatron.kernels import Kernels
    from vime_megatron.microbatch import MicroBatch
    from vime_megatron.model.core_attention import CoreAttention
    from vime_megatron.update import Update

_log = logging.getLogger(__name__)


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
        self.state = TrainerState(loss_scale=LossScale.of(config))
        self._family, self.shape = load_family(config.model)
        self.max_length = config.max_sequence_length or self.shape.max_positions
        self._platform = select_platform(config.device, device_index)
        self._parking = Parking(self._platform.device)
        self._meter = MemoryMeter(self._platform.device)
        self._source_given = False
        self._saving: SaveHandle | None = None
        with self._platform.active(), self._meter.phase("start"):
            self._build(rank, world_size, init_method)

    def _build(self, rank: int, world_size: int, init_method: str | None) -> None:
        from vime_megatron.kernels import select_kernels
        from vime_megatron.logprobs import settle_logits
        from vime_megatron.model.attention_choice import choose_attention, core_attention, obstacles
        from vime_megatron.model.moe import expert_product
        from vime_megatron.model.policy import DTYPES
        from vime_megatron.parallel import connect
        from vime_megatron.platform.build import describe_build

        config, shape, platform = self.config, self.shape, self._platform
        dtype = DTYPES[config.dtype]
        attention = choose_attention(config.attention, platform.device, dtype)
        kernels = select_kernels(config.kernels, platform.device, dtype)
        self.choices = {
            "device": str(platform.device),
            "build": describe_build(),
            "attention": attention,
            "kernels": kernels.name,
            "logits": settle_logits(config.head_dtype, dtype, platform.device, kernels, rank=rank),
        }
        if shape.experts:
            self.choices["experts"] = expert_product(platform.device, dtype)
        _log.info("rank %d: %s", rank, ", ".join(f"{name} {choice}" for name, choice in self.choices.items()))
        for name, reason in obstacles(platform.device, dtype).items():
            if reason:
                _log.debug("rank %d: no %s attention: %s", rank, name, reason)
        self.topology = connect(
            config, shape, rank=rank, world_size=world_size, init_method=init_method, backend=platform.backend
        )
        try:
            self._build_model(core_attention(attention), kernels, dtype)
        except BaseException:
            self.topology.close()  # a trainer that could not be built does not hold the process's groups
            raise

    def _build_model(self, core: CoreAttention, kernels: Kernels, dtype: torch.dtype) -> None:
        from vime_megatron.forward import Forward
        from vime_megatron.logprobs import vocab_shard
        from vime_megatron.model.context import share_heads
        from vime_megatron.model.packing import inverse_frequencies
        from vime_megatron.model.policy import build_policy

        config, shape, layout = self.config, self.shape, self.topology.layout
        if self.topology.cp_group is not None:
            core = share_heads(core, self.topology.cp_group)
        self._platform.seed(config.seed)
        self._kernels = kernels
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
            shard=vocab_shard(config, shape.vocab, self.topology, kernels),
            temperature=config.temperature,
            max_tokens=config.max_tokens_per_microbatch,
            context=self.topology.cp_group,
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
            self.topology.peers.agree(
                lambda: load_folder(self.config.model, self.params, self._placed, names),
                lambda seen: ModelError("not every rank can read the model", where=str(self.config.model), seen=seen),
            )

    def _wrap(self, dtype: torch.dtype) -> None:
        from vime_megatron.optim import build_optimizer, gradient_buffers, wrap_data_parallel
        from vime_megatron.weights.buffers import flatten_parameters, locate

        settings = self.config.optimizer
        split = {place.param for place in self._placed if place.split}
        for name, param in self.params.items():
            param.tensor_model_parallel = name in split  # type: ignore[attr-defined]  # Megatron's gradient norm asks
        shared = self.config.shared_weights
        buffers = [] if settings.distributed else flatten_parameters(self.params, shared=shared)
        self.ddp = wrap_data_parallel(self.model, settings)
        if settings.distributed:
            buffers = [buffer.param_data for buffer in gradient_buffers(self.ddp)]
        self._buffers, self._slots = locate(self.params, buffers)
        self.optimizer, self.scheduler = build_optimizer(self.ddp, settings, dtype)

    def step(self, sequences: Sequence[TrainSequence], loss: TokenLoss) -> StepMetrics:
        """Do one optimiser step on the global batch.

        Args:
            sequences: The global batch, the same on every rank.
            loss: Called once per packed micro-batch; see :data:`~vime_megatron.TokenLoss`. In float16 the whole
                batch goes through again, with a lower loss scale, where gradients overflow.

        Returns:
            Metrics of the whole batch, the same on every rank.

        Raises:
            BatchError: The batch cannot be used, or the loss's answer; weights and optimiser are as before.
            GradientError: The loss or a gradient is not finite; weights and optimiser are as before.
            TrainerError: The loss has raised on another rank, which raises it; weights and optimiser are as before.
        """
        from vime_megatron.update import apply_update, check_finite

        started = time.perf_counter()
        self._at_home("step", *MOVABLE)
        scale, redos = self.state.loss_scale, 0
        with self._platform.active():
            plan = self._plan(sequences)
            totals, norm, update = self._gradients(sequences, plan, loss, scale.value)
            while scale.too_high(loss=totals["loss"], norm=norm):
                scale, redos = scale.halved(), redos + 1
                totals, norm, update = self._gradients(sequences, plan, loss, scale.value)
            check_finite(self.ddp, self.topology, loss=totals["loss"], norm=norm, scale=scale.value)
            self.scheduler.step(increment=1)
            lr = float(self.optimizer.param_groups[0]["lr"])
            limit, device = self.config.optimizer.clip_grad, self._platform.device
            with self._meter.phase("update"):
                apply_update(update, self._kernels, norm=norm, limit=limit, device=device, scale=scale.value)
            self._platform.synchronize()
        self.state.step += 1
        self.state.loss_scale = scale.after_step()
        return StepMetrics(
            loss=totals.pop("loss"),
            grad_norm=norm,
            lr=lr,
            metrics=totals,
            tokens=sum(len(sequence) for sequence in sequences),
            seconds=time.perf_counter() - started,
            step=self.state.step,
            loss_scale=scale.value if self.config.dtype == "float16" else None,
            redos=redos,
        )

    def _gradients(
        self, sequences: Sequence[TrainSequence], plan: BatchPlan, loss: TokenLoss, scale: float
    ) -> tuple[dict[str, float], float, Update]:
        """Compute the batch's gradients; return the loss's totals, the norm and an update, all of the loss unscaled."""
        from vime_megatron.forward import check_loss
        from vime_megatron.update import gradient_norm, prepare_update

        with self._meter.phase("train"):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = self._microbatches(sequences, plan, every_token=False)
            sums, failure = self._forward.train(batches, plan.count, loss, scale=scale)
            norm_on_device = gradient_norm(self.optimizer, self._platform.device)  # queued before anything waits
            update = prepare_update(self.optimizer, self._kernels)
        # Memory is handed out as work is queued, so a phase is over before the device has done it.
        totals, problems = add_up(sums, self.topology, self._platform.device, failure)
        check_loss(failure, problems)
        return totals, float(norm_on_device) / scale, update

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
        with self._platform.active(), self._meter.phase("logprobs"):
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
        with self._platform.active(), self._meter.phase("offload"):
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
        with self._platform.active(), self._meter.phase("onload"):
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

    def save(
        self,
        folder: Path | str,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Publish a checkpoint at ``folder``: weights, optimiser, schedule, random state and step counter.

        It is written beside ``folder`` and renamed when it is complete and on disk; until then a checkpoint that is
        there stays valid. Every rank must call it, with the same arguments and a folder on a shared file system. A save
        that is still running is waited for first.

        Args:
            folder: Where the checkpoint will be.
            asynchronous: Return as soon as the state is copied to host memory; a thread does the rest.
            keep: Afterwards delete checkpoints beside ``folder`` whose names differ from its name in a lower number at
                the end, but for the newest; ``keep`` counts the new one. ``None`` deletes nothing.
            progress: Told the bytes that this rank has written and those that it will.

        Returns:
            The save; already complete unless it is asynchronous.

        Raises:
            CheckpointError: A rank could not write (on every rank), or the folder holds something other than a
                checkpoint: nothing was published; or an earlier asynchronous save failed and nobody has been told.
            TrainerError: State is offloaded, or ``keep`` is not positive.
        """
        from vime_megatron.checkpoint.save import save_checkpoint

        self._at_home("save", "optimizer", "weights")
        self._settle_save()
        with self._platform.active(), self._meter.phase("save"):
            self._saving = save_checkpoint(self, Path(folder), asynchronous=asynchronous, keep=keep, progress=progress)
        return self._saving

    def load(self, folder: Path | str, *, progress: Progress | None = None) -> None:
        """Continue from a checkpoint: exactly in the layout that wrote it, up to rounding in another.

        Every rank must call it. Another layout draws new random numbers.

        Args:
            folder: What :meth:`save` published.
            progress: Told the bytes that this rank has read and those that it will.

        Raises:
            CheckpointError: There is no valid checkpoint, a file fails its checksum, or it is of another model; the
                text lists missing and unexpected tensors. Nothing was loaded.
        """
        from vime_megatron.checkpoint.load import load_checkpoint

        self._at_home("load", "optimizer", "weights")
        self._settle_save()
        with self._platform.active(), self._meter.phase("load"):
            load_checkpoint(self, Path(folder), progress)

    def _settle_save(self) -> None:
        """Wait for a save in the background, and raise its failure if nobody has been told."""
        if self._saving is not None:
            self._saving.settle(self.config.timeout_s)
            self._saving = None

    def export_hf(
        self, folder: Path | str, *, max_file_bytes: int = 5 * 10**9, progress: Progress | None = None
    ) -> None:
        """Write the weights as a Hugging Face folder, with the source folder's configuration and tokenizer.

        Every rank must call it; rank 0 writes.

        Args:
            folder: Appears when it is complete; replaces a Hugging Face folder that is there.
            max_file_bytes: Largest safetensors file.
            progress: Told, on rank 0, the bytes that are written and those in all.

        Raises:
            CheckpointError: Rank 0 could not write (on every rank), or the folder holds something else.
        """
        from vime_megatron.weights.export import export_folder

        self._at_home("export", "weights")
        with self._platform.active(), self._meter.phase("export"):
            export_folder(self, Path(folder), max_file_bytes=max_file_bytes, progress=progress)

    def memory(self) -> dict[str, float]:
        """Report this rank's memory, in GiB.

        Returns:
            ``host_gib``, ``device_gib`` and ``device_reserved_gib``: resident, allocated and held by the allocator now.
            ``device_free_gib``: what the device's driver reports as free, whoever holds the rest.
            ``host_gib.<phase>`` and ``device_peak_gib.<phase>``: the highest so far of each phase that has run, among
            ``start``, ``train``, ``update``, ``logprobs``, ``offload``, ``onload``, ``save``, ``load`` and ``export``.
            ``offloaded_gib`` and ``pinned_gib``: state that is on the host now, and the pinned memory kept for it. On a
            CPU there are no entries for the device.
        """
        return self._meter.report() | self._parking.report()

    def close(self) -> None:
        """Leave the process groups; the trainer is not usable afterwards.

        Raises:
            CheckpointError: A save in the background failed and nobody has been told.
        """
        try:
            self._settle_save()
        finally:
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

        topology = self.topology
        sequence = self.config.tensor_parallel if self.config.sequence_parallel else 1
        for indices in plan.microbatches[topology.dp_rank]:
            yield build_microbatch(
                sequences,
                indices,
                inverse_frequencies=self._frequencies,
                device=self._platform.device,
                multiple=topology.cp_size * sequence,
                every_token=every_token,
                context=(topology.cp_rank, topology.cp_size),
            )
