"""Sections about what is trained, and how: algorithm, trainer, sync, pipeline, checkpoint."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from vime_grpo.config.base import Count, FilePath, NonNegative, NonNegativeInt, Positive, Section, Switch


class AlgorithmSection(Section):
    """Advantages, objective and normalisation; the papers are in the registry of `vime_grpo`."""

    advantage: Literal["grpo", "rloo"] = Field(
        default="grpo",
        description="Baseline of a reward: the group's mean (grpo) or the mean of the group's other samples (rloo).",
    )
    normalize_std: bool = Field(
        default=True,
        description='Divide advantages by the group\'s standard deviation. Off, and loss_aggregation = "horizon", is '
        "Dr. GRPO.",
    )
    policy_loss: Literal["clip", "cispo"] = Field(
        default="clip",
        description="Objective: PPO's clipped surrogate (clip), or CISPO's clipped importance weight (cispo).",
    )
    clip_low: NonNegative = Field(default=0.2, description="The ratio is clipped from below at 1 - clip_low.")
    clip_high: NonNegative = Field(default=0.28, description="The ratio is clipped from above at 1 + clip_high.")
    clip_dual: NonNegative = Field(
        default=0.0,
        description="Bound of the objective for negative advantages, above 1 (dual-clip PPO); 0 turns it off.",
    )
    kl_coef: NonNegative = Field(default=0.0, description="Weight of the KL penalty in the loss; 0 turns it off.")
    kl_kind: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        default="low_var_kl",
        description="Estimator of the KL penalty. As a loss k2 has the gradient of KL(policy, target), k3 and "
        "low_var_kl that of KL(target, policy), and k1 on average none: it holds nothing back.",
    )
    kl_target: Literal["reference", "behaviour"] = Field(
        default="reference",
        description="The KL penalty pulls towards the model that training started from (reference) or towards the "
        "policy that sampled (behaviour; needs no second model).",
    )
    loss_aggregation: Literal["sample_mean", "token_mean", "horizon"] = Field(
        default="sample_mean",
        description="Mean over samples of each sample's token mean, mean over all tokens, or the sum of each sample's "
        "tokens divided by rollout.max_response_tokens. Always over the global batch of an optimiser step.",
    )
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus; 0 turns it off.")
    steps_per_rollout: Count = Field(
        default=1, description="Optimiser steps that share one rollout's samples; divides rollout.batch_size."
    )
    old_logprobs: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="Logprobs in the ratio's denominator: the trainer's before the rollout's first update (recompute; "
        "with one update a rollout these come with the update's own forward pass), or the engine's (rollout).",
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="Whether the ratio that policy_loss clips is each token's, or its sequence's geometric mean (GSPO; "
        "the clip bounds are then much smaller).",
    )
    correction: Literal["none", "decoupled", "tis", "mis", "icepop"] = Field(
        default="none",
        description="Weight for samples of another policy than the trainer's, from the ratio trainer / sampler: as it "
        "is (decoupled PPO), truncated (tis), 0 above correction_high (mis) or 0 outside the band (icepop). Needs "
        'old_logprobs = "recompute".',
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="The ratio of a token, the product over its sequence, or the product's geometric mean.",
    )
    correction_low: NonNegative = Field(
        default=0.0, description="Lower bound of the correction's ratio, at most 1 (tis, icepop)."
    )
    correction_high: Positive = Field(
        default=2.0, description="Upper bound of the correction's ratio, at least 1 (tis, mis, icepop)."
    )

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> AlgorithmSection:
        if self.clip_low >= 1:
            raise ValueError(f"algorithm.clip_low is {self.clip_low}; a ratio is positive, so it must be below 1")
        if 0 < self.clip_dual <= 1:
            raise ValueError(f"algorithm.clip_dual is {self.clip_dual}; it must be above 1, or 0 for off")
        if self.clip_dual and self.policy_loss != "clip":
            raise ValueError('algorithm.clip_dual needs algorithm.policy_loss = "clip"')
        return self

    @model_validator(mode="after")
    def _correction_is_used(self) -> AlgorithmSection:
        low, high, name = self.correction_low, self.correction_high, self.correction
        if low >= high:
            raise ValueError(f"algorithm.correction_low ({low}) must be below algorithm.correction_high ({high})")
        if not low <= 1 <= high:
            raise ValueError(
                f"algorithm.correction_low ({low}) and algorithm.correction_high ({high}) must have 1 between them: it "
                "is the ratio of samples on policy, which a correction leaves as they are"
            )
        if low > 0 and name in ("none", "mis", "decoupled"):
            raise ValueError(
                f'algorithm.correction = "{name}" has no lower bound and algorithm.correction_low is {low}; "icepop" '
                "drops on both sides"
            )
        if high != type(self).model_fields["correction_high"].default and name in ("none", "decoupled"):
            raise ValueError(
                f'algorithm.correction = "{name}" has no upper bound and algorithm.correction_high is {high}; "tis" '
                'cuts there and "mis" drops'
            )
        if self.correction_level != "token" and name == "none":
            raise ValueError(
                f'algorithm.correction_level = "{self.correction_level}" says how to correct, and algorithm.correction '
                'is "none"'
            )
        if name != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f'algorithm.correction = "{name}" needs algorithm.old_logprobs = "recompute": with the engine\'s '
                "logprobs in the denominator the difference is in the ratio already"
            )
        return self


class TrainerSection(Section):
    """The Megatron-Core trainer: layout, numerics, optimiser."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="Type of weights and activations; gradients and optimiser state are float32. float16, with "
        "engine.dtype the same, brings the trainer's logprobs nearest to the engine's (arXiv 2510.26788).",
    )
    learning_rate: Positive = Field(default=1e-6, description="Peak learning rate of AdamW.")
    min_learning_rate: NonNegative = Field(default=0.0, description="Learning rate at the end of a decaying schedule.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Shape of the learning rate after the warm-up, to the last optimiser step."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Optimiser steps of linear warm-up from 0.")
    weight_decay: NonNegative = Field(default=0.1, description="Decoupled weight decay; biases and norms are left out.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    adam_beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of Adam's second moment.")
    adam_eps: Positive = Field(default=1e-8, description="Offset of Adam's denominator.")
    clip_grad: NonNegative = Field(
        default=1.0, description="Global gradient norm above which gradients are scaled down; 0 turns clipping off."
    )
    loss_scale: Literal["dynamic"] | float = Field(
        default="dynamic",
        description="What the loss is multiplied by in the backward pass of float16: a power of two, or dynamic, which "
        "finds one and computes a batch whose gradients overflow again with a lower one.",
    )
    loss_scale_window: Count = Field(
        default=100, description="Optimiser steps without an overflow after which a dynamic loss scale is doubled."
    )
    tensor_parallel: Count = Field(default=1, description="Ranks that share each matrix.")
    pipeline_parallel: Count = Field(default=1, description="Stages that share the layers.")
    context_parallel: Count = Field(
        default=1, description="Ranks that share each sequence: its tokens, and in attention its heads."
    )
    expert_parallel: Count = Field(
        default=1, description="Ranks that share the experts of a mixture; divides data_parallel x context_parallel."
    )
    data_parallel: Count = Field(default=1, description="Ranks (or groups of them) that share the batch.")
    sequence_parallel: bool = Field(
        default=False,
        description="Shard the activations between matrices over the tensor-parallel ranks; needs tensor_parallel "
        "above 1.",
    )
    distributed_optimizer: bool = Field(
        default=False, description="Shard the optimiser's state over the data- and context-parallel ranks."
    )
    activation_recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Recompute activations in the backward pass: those that are cheap (selective), or every layer from "
        "its input (full): the least memory, about a third more time.",
    )
    offload: Switch = Field(
        default="auto",
        description="Whether the trainer moves gradients and optimiser state off the GPU while engines generate: auto "
        "does so where they share a GPU that it would fill to more than nine tenths beside the engines.",
    )
    max_tokens_per_microbatch: Count = Field(
        default=8192,
        description="Token budget of one packed micro-batch on a rank, at least rollout.max_context_tokens. It changes "
        "memory and speed, never the result.",
    )
    logprob_chunk_tokens: Count = Field(
        default=1024,
        description="Tokens whose logits exist at one time; bounds the memory of the vocabulary projection.",
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of everything random in the trainer.")
    threads: NonNegativeInt = Field(default=0, description="CPU threads of one rank; 0 shares out the cores.")
    step_deadline_s: Positive = Field(default=1800.0, description="Seconds one phase of the trainer may take.")

    @model_validator(mode="after")
    def _scale_is_used(self) -> TrainerSection:
        scale, window = self.loss_scale, self.loss_scale_window
        own_window = window != type(self).model_fields["loss_scale_window"].default
        if self.dtype != "float16" and (scale != "dynamic" or own_window):
            name, seen = ("loss_scale", scale) if scale != "dynamic" else ("loss_scale_window", window)
            raise ValueError(
                f'trainer.{name} is {seen:g} and trainer.dtype = "{self.dtype}" is not scaled: only "float16" is'
            )
        if scale == "dynamic":
            return self
        if not 1 <= scale < math.inf or math.frexp(scale)[0] != 0.5:
            raise ValueError(
                f"trainer.loss_scale is {scale:g}; it must be a power of two, at least 1, so that it rounds nothing"
            )
        if own_window:
            raise ValueError(
                f"trainer.loss_scale_window is {window} and trainer.loss_scale is fixed at {scale:g}: "
                'only "dynamic" grows'
            )
        return self

    @property
    def world_size(self) -> int:
        """Trainer ranks: tensor_parallel x pipeline_parallel x context_parallel x data_parallel.

        Expert parallelism adds none: it takes its ranks from the data- and context-parallel ones.
        """
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel


class SyncSection(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", "shm", "ipc", "collective", "disk"] = Field(
        default="auto",
        description="Carrier of the weights: POSIX shared memory (shm, CPU) or handles of GPU memory (ipc) on one "
        "host, collective operations or a shared folder (disk) between hosts. auto takes what fits the placement, but "
        "never the folder.",
    )
    mode: Literal["auto", "copy", "alias"] = Field(
        default="auto",
        description="Whether engines copy the weights into their own memory (copy) or use the trainer's memory "
        "(alias); auto takes alias wherever the layouts allow it, and the run says which it was.",
    )
    deadline_s: Positive = Field(default=300.0, description="Seconds that one update of all engines may take.")
    reload: bool = Field(
        default=False,
        description="Let the engines' own loaders fill what no copy can reach, such as experts in a kernel's layout. "
        "Such an update is slower and cannot be taken back: a failure in it leaves the engine refusing to serve.",
    )
    digest: Literal["off", "sampled", "full"] = Field(
        default="full", description="How much of every tensor is digested by the trainer and checked by the engines."
    )

    @model_validator(mode="after")
    def _only_mapped_memory_is_shared(self) -> SyncSection:
        if self.mode == "alias" and self.transport in ("collective", "disk"):
            raise ValueError(
                f'sync.mode = "alias" lets engines run on the trainer\'s memory, which sync.transport = '
                f'"{self.transport}" does not map; use "auto", "shm" or "ipc"'
            )
        return self


class PipelineSection(Section):
    """The loop that ties the parts together."""

    mode: str = Field(
        default="colocated",
        pattern=r"^[a-z][a-z0-9_]*$",
        description="Name of the pipeline, as registered in the entry point group vime_grpo.pipelines.",
    )
    steps: Count = Field(description="Steps of the run: each generates, scores, trains and updates the engines.")
    run_dir: FilePath = Field(description="The run folder: metrics, logs, checkpoints, resolved configuration.")
    ray_start_deadline_s: Positive = Field(
        default=120.0, description="Seconds that Ray and its processes have to start."
    )
    max_weight_lag: NonNegativeInt = Field(
        default=1,
        description="Most versions between the oldest token of a sample and the weights that train on it (async).",
    )
    queue_groups: NonNegativeInt = Field(
        default=0,
        description="Finished groups that may wait for the trainer (async); 0 means rollout.batch_size x "
        "(max_weight_lag + 1).",
    )
    on_expired: Literal["drop", "refresh"] = Field(
        default="refresh",
        description="What happens to a group that has become older than max_weight_lag (async): it is dropped and "
        "counted, or its prompt is generated again.",
    )
    update_mode: Literal["keep", "drain"] = Field(
        default="keep",
        description="Running requests during a weight update (async): engines freeze them and go on with the new "
        "weights (keep), or let them end first (drain).",
    )
    memory_check: Literal["stop", "warn"] = Field(
        default="stop",
        description="When a phase is not expected to fit into a GPU: refuse the run before it starts, or say so and "
        "try. Activations are an estimate.",
    )
    pools: Literal["disjoint", "shared"] = Field(
        default="disjoint",
        description="GPUs of trainer and engines (async): their own each, or the same ones for both, at the same time, "
        "where engine.gpu_memory_utilization is the engines' share of the memory.",
    )


class CheckpointSection(Section):
    """When the run is saved."""

    every: NonNegativeInt = Field(default=20, description="Save after every so many steps; 0 saves at the end only.")
    last: bool = Field(
        default=True,
        description="Save at the end, also when SIGTERM stops the run. false saves after every so many steps only, "
        "never with every = 0, and a run that is stopped says that it has not saved. The trained model is written in "
        "any case.",
    )
    keep: Count = Field(default=2, description="Checkpoints kept; older ones are deleted after a newer one is whole.")
