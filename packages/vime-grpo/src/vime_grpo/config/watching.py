"""Sections about watching a run: evaluation, guards, tracking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vime_grpo.config.base import Count, DottedPath, FilePath, NonNegative, NonNegativeInt, Positive, Section
from vime_grpo.config.generation import PromptKind, check_source

Action = Literal["warn", "stop", "off"]

PassK = Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
"""An array of positive whole numbers."""


class EvaluationSection(Section):
    """Prompts that are never trained on; scored by [reward], with [rollout]'s lengths and [data]'s template."""

    every: NonNegativeInt = Field(
        default=0, description="Evaluate after every so many steps, and at the end; 0 turns it off."
    )
    at_start: bool = Field(default=False, description="Also evaluate before the first step.")
    kind: PromptKind = Field(default="jsonl", description="Source of the prompts, as data.kind.")
    path: FilePath | None = Field(default=None, description="The file, as data.path.")
    source: DottedPath | None = Field(default=None, description="Your own data source, as data.source.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of your own data source.")
    prompt_key: str = Field(default="prompt", description="Key of the prompt, as data.prompt_key.")
    label_key: str | None = Field(default=None, description="Key of the reference answer, as data.label_key.")
    task: str | None = Field(default=None, description="Name of the reasoning-gym task.")
    task_config: dict[str, Any] = Field(default_factory=dict, description="Settings of the reasoning-gym task.")
    size: Count | None = Field(
        default=None, description="Number of prompts; required for the kinds reasoning_gym and custom."
    )
    seed: NonNegativeInt = Field(
        default=1_000_003, description="Seed of the task's problems; another one than data.seed gives other problems."
    )
    samples_per_prompt: Count = Field(default=1, description="Samples of each prompt.")
    temperature: NonNegative = Field(default=0.0, description="Sampling temperature; 0 takes the likeliest token.")
    solved_at: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Reward from which on a sample counts as solved, for pass@k.",
    )
    pass_k: PassK = Field(
        default=(1,),
        description="The k of each pass@k that is reported, estimated without bias from samples_per_prompt samples "
        "(arXiv:2107.03374).",
    )

    @property
    def enabled(self) -> bool:
        """Whether the run evaluates at all."""
        return self.every > 0 or self.at_start

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> EvaluationSection:
        if not self.enabled:
            return self
        check_source(self, "evaluation", self.kind, finite=True)
        if max(self.pass_k) > self.samples_per_prompt:
            raise ValueError(
                f"evaluation.pass_k asks for pass@{max(self.pass_k)}, which needs as many samples of a prompt; "
                f"evaluation.samples_per_prompt is {self.samples_per_prompt}"
            )
        if len(set(self.pass_k)) < len(self.pass_k):
            raise ValueError(f"evaluation.pass_k names a k twice: {list(self.pass_k)}")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"evaluation.temperature is 0, so the {self.samples_per_prompt} samples of a prompt would be the same; "
                "raise it, or set evaluation.samples_per_prompt = 1"
            )
        return self


class GuardsSection(Section):
    """What must not go unseen: each guard warns, stops the run (without a save: the last one stays), or is off."""

    logprob_difference: Positive = Field(
        default=0.1,
        description="Largest train/train_rollout_logprob_abs_diff of a step's first update, nats: above it, trainer "
        "and engine do not compute the same model.",
    )
    logprob_difference_action: Action = Field(default="stop", description="When the difference is larger.")
    zero_rewards: Count = Field(default=5, description="Steps in a row in which every sample was scored 0.")
    zero_rewards_action: Action = Field(
        default="warn", description="When so many steps had no reward; the text gives the verifier's reasons."
    )
    max_lag_action: Action = Field(
        default="stop", description="When a trained token was older than pipeline.max_weight_lag."
    )
    engine_version_action: Action = Field(
        default="stop", description="When an engine holds another version of the weights than the trainer published."
    )
    nonfinite_action: Action = Field(
        default="stop", description="When a metric is not finite; with warn it is left out of the metrics file."
    )


class TrackingSection(Section):
    """What is shown of the run; runs/.../metrics.jsonl is always written."""

    console: Literal["live", "plain", "off"] = Field(
        default="live",
        description="Progress on the terminal: a live display, one line a step, or nothing. Live becomes plain where "
        "the output is no terminal, and says so.",
    )
    plot: bool = Field(default=True, description="Draw reward.png in the run folder at the end.")
    tensorboard: bool = Field(
        default=False, description="Also write TensorBoard events into the run folder; needs vime-grpo[tensorboard]."
    )
    wandb: bool = Field(default=False, description="Also log to Weights & Biases; needs vime-grpo[wandb].")
    wandb_project: str | None = Field(default=None, description="Project of the run; required with tracking.wandb.")
    wandb_name: str | None = Field(default=None, description="Name of the run; by default the run folder's name.")
    samples: NonNegativeInt = Field(
        default=2, description="Best and worst samples of a step, so many of each, kept in samples.jsonl; 0 keeps none."
    )

    @model_validator(mode="after")
    def _wandb_has_a_project(self) -> TrackingSection:
        if self.wandb and not self.wandb_project:
            raise ValueError("tracking.wandb needs tracking.wandb_project: the project that the run is shown under")
        return self
