"""What a trainer is told: model folder, layout, numerics, batch budget and optimiser.

The classes are frozen and check themselves, so that a trainer never starts on values that cannot work. They hold plain
Python values only: importing this module needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vime_megatron.errors import TrainerError

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
HeadDtype = Literal["model", "float32"]
AttentionBackend = Literal["auto", "sdpa", "varlen", "flash", "te"]
KernelBackend = Literal["auto", "torch", "triton"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["constant", "linear", "cosine"]


def _require(ok: bool, name: str, seen: object, expected: str) -> None:
    if not ok:
        raise TrainerError("bad trainer setting", where=name, seen=repr(seen), expected=expected)


def _require_choices(settings: object, **choices: Any) -> None:
    """Refuse a value that is not among its ``Literal``'s: most would be taken for another one further on."""
    for name, kind in choices.items():
        value, known = getattr(settings, name), get_args(kind)
        _require(value in known, name, value, "one of " + ", ".join(map(repr, known)))


def _is_scale(value: object) -> bool:
    """Tell what a loss may be scaled by; other numbers than powers of two would round every gradient."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value == "dynamic"
    return 1 <= value < math.inf and math.frexp(value)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule, as Megatron's ``OptimizerParamScheduler`` runs it.

    Update ``k`` (counted from 1) uses ``lr * k / warmup_steps`` while ``k <= warmup_steps``. After that the rate is
    constant, or falls to ``min_lr`` at update ``decay_steps``.

    Attributes:
        lr: Peak learning rate.
        min_lr: Final learning rate of the linear and cosine schedules.
        schedule: Shape after the warm-up.
        warmup_steps: Updates of linear warm-up from 0; 0 means none.
        decay_steps: Update at which ``min_lr`` is reached; required unless the schedule is constant, which has none.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.
        eps: AdamW's denominator offset.
        weight_decay: Decoupled weight decay; biases and norms are left out.
        clip_grad: Global gradient norm above which gradients are scaled down; 0 means no clipping.
        distributed: Shard optimiser state over data-parallel ranks (Megatron's distributed optimiser).
        loss_scale: What the loss is multiplied by for the backward pass of float16 (:mod:`vime_megatron.loss_scale`): a
            fixed power of two, or ``dynamic``, which finds one. Other types are not scaled.
        loss_scale_window: Steps without an overflow after which a dynamic scale is doubled.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = False
    loss_scale: Literal["dynamic"] | float = "dynamic"
    loss_scale_window: int = 100

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            TrainerError: A value is out of range; the text names it.
        """
        _require_choices(self, schedule=Schedule)
        _require(self.lr > 0, "optimizer.lr", self.lr, "a positive number")
        _require(0 <= self.min_lr <= self.lr, "optimizer.min_lr", self.min_lr, f"between 0 and lr ({self.lr})")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        _require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "in [0, 1)")
        _require(self.eps > 0, "optimizer.eps", self.eps, "a positive number")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        _require(self.clip_grad >= 0, "optimizer.clip_grad", self.clip_grad, "at least 0")
        _require(
            _is_scale(self.loss_scale),
            "optimizer.loss_scale",
            self.loss_scale,
            "'dynamic' or a power of two, at least 1",
        )
        _require(self.loss_scale_window >= 1, "optimizer.loss_scale_window", self.loss_scale_window, "at least 1")
        if self.schedule == "constant":
            expected = "None with schedule 'constant', which never falls"
            _require(self.decay_steps is None, "optimizer.decay_steps", self.decay_steps, expected)
        else:
            _require(
                self.decay_steps is not None and self.decay_steps > self.warmup_steps,
                "optimizer.decay_steps",
                self.decay_steps,
                f"more than warmup_steps ({self.warmup_steps}) with schedule {self.schedule!r}",
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Everything a :class:`~vime_megatron.MegatronTrainer` needs to know.

    Data parallelism is what remains: ``world_size / (tensor * pipeline * context)``.

    Attributes:
        model: Hugging Face folder with ``config.json`` and safetensors.
        tensor_parallel: Ranks that share each matrix.
        pipeline_parallel: Stages that share the layers.
        context_parallel: Ranks that share each packed row: its tokens, and for attention its heads.
        expert_parallel: Ranks that share the experts of a mixture; refused for a model without experts.
        expert_tensor_parallel: Ranks that share each expert's matrices: ``None`` for as many as ``tensor_parallel``, or
            1 for whole experts; these need ``sequence_parallel``, so that tensor-parallel ranks have different tokens.
        sequence_parallel: Shard activations between matrices over the tensor-parallel ranks.
        dtype: Type of the weights and activations; optimiser and gradients are float32.
        device: ``auto`` takes the GPU when there is one, else the CPU.
        max_tokens_per_microbatch: Token budget of one packed micro-batch, all context-parallel ranks that share it
            together; a longer sequence goes alone.
        max_sequence_length: Longest sequence accepted; ``None`` takes the model's own limit.
        temperature: Divides the logits before the softmax, as the rollout's sampler did.
        logprob_chunk_tokens: Positions whose logits exist at one time; bounds the memory of the vocabulary projection.
        head_dtype: Type of the logits: the weights' own (``model``), or ``float32``, for engines that do likewise.
        recompute: Activations that the backward pass computes again instead of keeping: ``selective`` those that are
            cheap (outputs of norms and of the gated activation), ``full`` each layer from its input.
        kernels: Steps between the matrix products; ``auto`` takes Triton on a GPU in half precision, else torch.
        attention: Core attention; ``auto`` takes the fastest that works on the device, row by row. ``sdpa`` and
            ``varlen`` are torch's own, ``flash`` is flash-attn's, ``te`` TransformerEngine's; one that is forced and
            absent is an error.
        seed: Seed of everything random in the trainer.
        random_weights: Start from a seeded random initialisation instead of the folder's weights.
        shared_weights: On a CPU, keep the weights in shared memory, where engines of the same host can run on them; the
            distributed optimiser brings buffers of its own and does not.
        timeout_s: Deadline of every collective operation, in seconds.
        optimizer: Optimiser and schedule.
    """

    model: Path
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    sequence_parallel: bool = False
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    max_tokens_per_microbatch: int = 8192
    max_sequence_length: int | None = None
    temperature: float = 1.0
    logprob_chunk_tokens: int = 1024
    head_dtype: HeadDtype = "model"
    recompute: Recompute = "none"
    kernels: KernelBackend = "auto"
    attention: AttentionBackend = "auto"
    seed: int = 0
    random_weights: bool = False
    shared_weights: bool = False
    timeout_s: float = 600.0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    def __post_init__(self) -> None:
        """Check every value and make ``model`` a path.

        Raises:
            TrainerError: A value is out of range; the text names it.
        """
        object.__setattr__(self, "model", Path(self.model))
        _require_choices(self, dtype=Dtype, device=Device, head_dtype=HeadDtype, recompute=Recompute)
        _require_choices(self, kernels=KernelBackend, attention=AttentionBackend)
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("max_tokens_per_microbatch", "logprob_chunk_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        limit = self.max_sequence_length
        _require(limit is None or limit >= 1, "max_sequence_length", limit, "None or at least 1")
        _require(self.temperature > 0, "temperature", self.temperature, "a positive number (greedy has no gradient)")
        _require(self.timeout_s > 0, "timeout_s", self.timeout_s, "a positive number of seconds")
        scale = self.optimizer.loss_scale
        expected = f"'dynamic', which is not used, with dtype {self.dtype!r}: only float16 needs a scale"
        _require(self.dtype == "float16" or scale == "dynamic", "optimizer.loss_scale", scale, expected)
        _require(
            not self.sequence_parallel or self.tensor_parallel > 1,
            "sequence_parallel",
            self.sequence_parallel,
            "false, or tensor_parallel above 1: it shards over the tensor-parallel ranks",
        )
        _require(
            self.expert_tensor_parallel in (None, 1, self.tensor_parallel),
            "expert_tensor_parallel",
            self.expert_tensor_parallel,
            f"None, 1 or tensor_parallel ({self.tensor_parallel}): parts of a split are not built",
        )
        _require(
            not self.whole_experts or self.sequence_parallel,
            "expert_tensor_parallel",
            self.expert_tensor_parallel,
            "None without sequence_parallel: tensor-parallel ranks would run the same tokens",
        )

    @property
    def whole_experts(self) -> bool:
        """Tensor parallelism splits the model but not its experts."""
        return self.expert_tensor_parallel == 1 and self.tensor_parallel > 1

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that the parallel sizes do not divide.

        Args:
            world_size: Number of ranks.

        Raises:
            TrainerError: The text says which sizes.
        """
        share = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if world_size % share:
            raise TrainerError(
                "parallel sizes do not divide the world",
                seen=f"{world_size} ranks",
                expected=f"a multiple of tensor x pipeline x context = {share}",
            )
        kind = "tensor-, data- and context-parallel" if self.whole_experts else "data- and context-parallel"
        replicas = world_size // (self.pipeline_parallel * (1 if self.whole_experts else self.tensor_parallel))
        if replicas % self.expert_parallel:
            raise TrainerError(
                f"expert parallelism does not divide the {kind} ranks",
                seen=f"{replicas} {kind} ranks",
                expected=f"a multiple of expert_parallel = {self.expert_parallel}",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, for manifests and logs."""
        return asdict(self) | {"model": str(self.model)}
