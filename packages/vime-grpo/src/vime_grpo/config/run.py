"""The whole configuration of a run, and the rules that tie its sections together."""

from __future__ import annotations

from pydantic import Field, model_validator

from vime_grpo.config.base import Section
from vime_grpo.config.engine_arguments import argument_problems
from vime_grpo.config.generation import DataSection, EngineSection, ModelSection, RewardSection, RolloutSection
from vime_grpo.config.training import (
    AlgorithmSection,
    CheckpointSection,
    PipelineSection,
    SyncSection,
    TrainerSection,
)
from vime_grpo.config.watching import EvaluationSection, GuardsSection, TrackingSection


class RunConfig(Section):
    """Everything that a run is told; immutable, and checked as a whole.

    Constructing one directly raises `pydantic.ValidationError`; `load_config` turns that into a `ConfigError` that
    names the file and the key.
    """

    model: ModelSection = Field(description="The policy.")
    data: DataSection = Field(description="Prompts.")
    rollout: RolloutSection = Field(description="Generation.")
    engine: EngineSection = Field(default_factory=EngineSection, description="vLLM servers.")
    reward: RewardSection = Field(description="Scoring.")
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection, description="Advantages and objective.")
    trainer: TrainerSection = Field(default_factory=TrainerSection, description="Megatron-Core trainer.")
    sync: SyncSection = Field(default_factory=SyncSection, description="Weight transfer.")
    pipeline: PipelineSection = Field(description="The loop.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Held-out prompts.")
    guards: GuardsSection = Field(default_factory=GuardsSection, description="What ends a run.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Saving.")
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Progress display and plots.")

    @model_validator(mode="after")
    def _resolve_and_check(self) -> RunConfig:
        if self.engine.max_model_len is None:
            engine = self.engine.model_copy(update={"max_model_len": self.rollout.max_context_tokens})
            object.__setattr__(self, "engine", engine)
        problems = [
            *_batch_problems(self),
            *_length_problems(self),
            *_sampling_problems(self),
            *argument_problems(self.model, self.engine),
            *_schedule_problems(self),
            *_layout_problems(self),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def samples_per_rollout(self) -> int:
        """Samples that one step generates when every group is whole."""
        return self.rollout.batch_size * self.rollout.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimiser step: the global batch."""
        return self.samples_per_rollout // self.algorithm.steps_per_rollout

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run; decaying schedules end here."""
        return self.pipeline.steps * self.algorithm.steps_per_rollout

    @property
    def rollout_devices(self) -> int:
        """Devices of the run that generate: the engines it starts times their tensor-parallel size."""
        return self.engine.count * self.engine.tensor_parallel

    @property
    def queue_groups(self) -> int:
        """Finished groups that may wait for the trainer: pipeline.queue_groups, or what the lag allows."""
        return self.pipeline.queue_groups or self.rollout.batch_size * (self.pipeline.max_weight_lag + 1)

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of a frozen reference model are needed."""
        return self.algorithm.kl_coef > 0 and self.algorithm.kl_target == "reference"


def _batch_problems(config: RunConfig) -> list[str]:
    problems = []
    prompts, updates = config.rollout.batch_size, config.algorithm.steps_per_rollout
    if prompts % updates:
        problems.append(
            f"rollout.batch_size ({prompts}) is not a multiple of algorithm.steps_per_rollout ({updates}): groups are "
            "never cut, so every optimiser step takes the same number of whole groups"
        )
    elif config.samples_per_update % config.trainer.data_parallel:
        problems.append(
            f"the {config.samples_per_update} samples of an optimiser step (rollout.batch_size x "
            "rollout.samples_per_prompt / algorithm.steps_per_rollout) are not a multiple of trainer.data_parallel "
            f"({config.trainer.data_parallel}): some ranks would idle"
        )
    return problems


def _length_problems(config: RunConfig) -> list[str]:
    problems = []
    context, engine = config.rollout.max_context_tokens, config.engine.max_model_len
    if engine is not None and engine < context:
        problems.append(f"engine.max_model_len ({engine}) is below rollout.max_context_tokens ({context})")
    if config.trainer.max_tokens_per_microbatch < context:
        problems.append(
            f"trainer.max_tokens_per_microbatch ({config.trainer.max_tokens_per_microbatch}) is below "
            f"rollout.max_context_tokens ({context}): one sample could exceed the budget, and a sample is never cut"
        )
    return problems


def _sampling_problems(config: RunConfig) -> list[str]:
    cut = [name for name, off in (("top_p", 1.0), ("top_k", -1)) if getattr(config.rollout, name) != off]
    if cut and config.guards.logprob_difference_action == "stop":
        return [
            f"rollout.{' and rollout.'.join(cut)} cut the sampled distribution, so the engine's logprobs differ from "
            "the trainer's by design and the guard of the logprob difference would stop the run: set "
            'guards.logprob_difference_action = "off", or sample from the whole distribution'
        ]
    return []


def _schedule_problems(config: RunConfig) -> list[str]:
    problems = []
    trainer = config.trainer
    if trainer.min_learning_rate > trainer.learning_rate:
        problems.append(
            f"trainer.min_learning_rate ({trainer.min_learning_rate}) is above trainer.learning_rate "
            f"({trainer.learning_rate})"
        )
    if trainer.lr_schedule != "constant" and trainer.warmup_steps >= config.optimizer_steps:
        problems.append(
            f"trainer.warmup_steps ({trainer.warmup_steps}) leaves nothing of the run's {config.optimizer_steps} "
            f"optimiser steps for the {trainer.lr_schedule} schedule"
        )
    return problems


def _layout_problems(config: RunConfig) -> list[str]:
    problems: list[str] = []
    trainer, pipeline = config.trainer, config.pipeline
    spread = trainer.data_parallel * trainer.context_parallel
    if trainer.distributed_optimizer and spread == 1:
        problems.append(
            "trainer.distributed_optimizer shards over data- and context-parallel ranks; trainer.data_parallel and "
            "trainer.context_parallel are 1"
        )
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        problems.append("trainer.sequence_parallel shards over tensor-parallel ranks; trainer.tensor_parallel is 1")
    if spread % trainer.expert_parallel:
        problems.append(
            f"trainer.expert_parallel ({trainer.expert_parallel}) does not divide trainer.data_parallel x "
            f"trainer.context_parallel ({spread}), whose ranks share the experts"
        )
    if 0 < pipeline.queue_groups < config.rollout.batch_size:
        problems.append(
            f"pipeline.queue_groups ({pipeline.queue_groups}) is below rollout.batch_size "
            f"({config.rollout.batch_size}): a step's groups would never be there together"
        )
    return problems + _asynchronous_problems(config)


def _asynchronous_problems(config: RunConfig) -> list[str]:
    """Return what the asynchronous loop would not look at, and what only it does."""
    problems = []
    if config.pipeline.mode != "async":
        if config.pipeline.pools == "shared":
            problems.append('pipeline.pools belongs to pipeline.mode = "async"; colocated pools are shared anyway')
        return problems
    colocated_only = [key for key in ("over_sample", "partial") if getattr(config.rollout, key)]
    if colocated_only:
        problems.append(
            f"{' and '.join('rollout.' + key for key in colocated_only)} belong to a loop that is asked step by step; "
            'with pipeline.mode = "async" generation runs ahead by itself and is never cut'
        )
    switches = {"trainer.offload": config.trainer.offload, "engine.sleep": config.engine.sleep}
    turns = [key for key, value in switches.items() if value == "on"]
    if turns:
        problems.append(
            f'{" and ".join(turns)} = "on" belongs to a loop in which trainer and engines take turns; with '
            'pipeline.mode = "async" both work all the time'
        )
    return problems
