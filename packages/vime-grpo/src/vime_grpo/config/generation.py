"""Sections about what is generated: model, data, rollout, engine, reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vime_grpo.config.base import Count, FilePath, Fraction, Ids, NonNegativeInt, Positive, Section, Words


class ModelSection(Section):
    """The policy that is trained."""

    path: FilePath = Field(
        description="Hugging Face folder of the policy: config.json, safetensors, tokenizer and chat template. The "
        "trainer starts from it and the engines serve it."
    )


class DataSection(Section):
    """Where prompts come from."""

    kind: Literal["jsonl", "parquet", "reasoning_gym"] = Field(
        default="jsonl", description="Source of the prompts: a file, or a reasoning-gym task that makes them."
    )
    path: FilePath | None = Field(default=None, description="The file, for the kinds jsonl and parquet.")
    prompt_key: str = Field(
        default="prompt", description="Key of the prompt: a plain string or a list of chat messages."
    )
    label_key: str | None = Field(
        default=None, description="Key of the reference answer that the reward compares with."
    )
    metadata_key: str | None = Field(
        default=None, description="Key of an object that is handed to the reward as it is."
    )
    task: str | None = Field(default=None, description="Name of the task, for the kind reasoning_gym.")
    task_config: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the reasoning-gym task, such as { max_terms = 2 }."
    )
    size: Count | None = Field(
        default=None, description="Number of prompts in the data set; required for the kind reasoning_gym."
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of the task's problems and of the shuffle.")
    shuffle: bool = Field(default=True, description="Shuffle every epoch, from the seed and the epoch's number.")
    apply_chat_template: bool = Field(
        default=True,
        description="Render prompts with the tokenizer's chat template; a plain string becomes one user message.",
    )
    system_prompt: str | None = Field(
        default=None, description="System message put before each prompt; needs apply_chat_template."
    )
    overlong: Literal["error", "drop"] = Field(
        default="error",
        description="What happens to a prompt that leaves no room for rollout.max_response_tokens in the context: an "
        "error, or it is dropped and counted.",
    )

    @model_validator(mode="after")
    def _kind_has_its_source(self) -> DataSection:
        if self.kind == "reasoning_gym":
            missing = [name for name in ("task", "size") if getattr(self, name) is None]
            unused = [name for name in ("path",) if getattr(self, name) is not None]
        else:
            missing = [name for name in ("path",) if getattr(self, name) is None]
            unused = [name for name in ("task", "size") if getattr(self, name) is not None]
            unused += ["task_config"] if self.task_config else []
        if missing:
            raise ValueError(f"kind {self.kind!r} needs {' and '.join('data.' + name for name in missing)}")
        if unused:
            raise ValueError(f"kind {self.kind!r} does not use {' and '.join('data.' + name for name in unused)}")
        if self.system_prompt is not None and not self.apply_chat_template:
            raise ValueError("data.system_prompt needs data.apply_chat_template = true")
        return self


class RolloutSection(Section):
    """How many samples are generated, and how they are sampled."""

    batch_size: Count = Field(description="Prompts a step.")
    samples_per_prompt: Count = Field(
        default=8, description="Samples of each prompt: the size of a GRPO group, at least 2."
    )
    max_response_tokens: Count = Field(
        description="Longest response, in tokens; longer ones are cut and marked truncated."
    )
    max_context_tokens: Count = Field(description="Longest prompt and response together, in tokens.")
    temperature: Positive = Field(
        default=1.0, description="Sampling temperature. The trainer divides its logits by the same value."
    )
    top_p: Fraction = Field(
        default=1.0,
        description="Nucleus sampling. Below 1 the engine's logprobs are of the cut distribution and the trainer's of "
        "the whole one, so pipeline.logprob_diff_limit must be 0.",
    )
    top_k: int = Field(default=-1, ge=-1, description="Sample from the k likeliest tokens only; -1 from all. As top_p.")
    stop: Words = Field(default=(), description="Strings that end a response.")
    stop_token_ids: Ids = Field(default=(), description="Token ids that end a response, besides the model's own.")
    seed: NonNegativeInt = Field(default=0, description="Seed from which the seed of every request is derived.")
    concurrency: Count = Field(default=256, description="Requests in flight at one time, over all engines.")
    request_deadline_s: Positive = Field(default=600.0, description="Seconds after which a request is given up.")
    retries: NonNegativeInt = Field(
        default=2, description="How often a failed request is sent again before the step fails."
    )

    @model_validator(mode="after")
    def _sampling_is_possible(self) -> RolloutSection:
        if self.top_k == 0:
            raise ValueError("rollout.top_k is 0; use -1 for all tokens, or at least 1")
        if self.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt is 1; group-relative advantages need at least 2 samples of a prompt, "
                "because a group of one is its own mean"
            )
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens ({self.max_response_tokens}) leaves no room for a prompt in "
                f"rollout.max_context_tokens ({self.max_context_tokens})"
            )
        return self


class EngineSection(Section):
    """The vLLM servers that generate."""

    count: Count = Field(default=1, description="Number of engines, each a vLLM server process.")
    tensor_parallel: Count = Field(default=1, description="Devices of one engine (tensor parallelism).")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="Type of the engine's weights. With the trainer's, logprobs agree best."
    )
    max_model_len: Count | None = Field(
        default=None,
        description="Longest context that the engine is started for; by default rollout.max_context_tokens.",
    )
    start_deadline_s: Positive = Field(default=600.0, description="Seconds an engine has to become ready.")
    gpu_memory_utilization: Fraction = Field(
        default=0.6, description="Share of a GPU's memory that vLLM may use (GPU only)."
    )
    enforce_eager: bool = Field(
        default=False, description="No compilation and no captured graphs: starts fast, runs slower."
    )
    kv_cache_gib: Positive = Field(default=1.0, description="KV cache of one engine in GiB (CPU only).")
    threads: NonNegativeInt = Field(
        default=0, description="CPU threads of one engine (CPU only); 0 shares out the cores."
    )
    extra_args: Words = Field(default=(), description="Further arguments of the vLLM server, as on its command line.")


class RewardSection(Section):
    """How a sample is scored. Exactly one of name and path is set."""

    name: Literal["exact_match", "math_verify", "reasoning_gym"] | None = Field(
        default=None,
        description="Built-in reward: exact_match (the response equals the label), math_verify (mathematical equality "
        "of the final answer), reasoning_gym (the task's own scorer).",
    )
    path: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*[:.][A-Za-z_]\w*$",
        description="Dotted path of your own reward, `package.module:function`: `async def fn(sample) -> float`.",
    )
    timeout_s: Positive = Field(default=30.0, description="Seconds after which scoring one sample is given up.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward.")

    @model_validator(mode="after")
    def _one_reward(self) -> RewardSection:
        if (self.name is None) == (self.path is None):
            raise ValueError("set exactly one of reward.name and reward.path")
        return self
