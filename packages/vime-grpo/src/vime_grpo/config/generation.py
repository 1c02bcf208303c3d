"""Sections about what is generated: model, data, rollout, engine, reward."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vime_grpo.config.base import (
    Count,
    DottedPath,
    FilePath,
    Fraction,
    Ids,
    NonNegativeInt,
    Positive,
    Section,
    Switch,
    Words,
)

PromptKind = Literal["jsonl", "parquet", "reasoning_gym", "custom"]

#: The settings that each kind of prompt source needs, and those it reads if they are set.
_SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "jsonl": (("path",), ()),
    "parquet": (("path",), ()),
    "reasoning_gym": (("task", "size"), ("task_config",)),
    "custom": (("source",), ("options",)),
}


def check_source(section: Section, name: str, kind: str, *, finite: bool = False) -> None:
    """Check that a kind of prompt source has the settings that it needs, and none that it would ignore.

    Args:
        section: The section that describes the source.
        name: The section's name, for the text.
        kind: The kind of source.
        finite: Whether the number of prompts must be known: a source of one's own may have no end.

    Raises:
        ValueError: A setting is missing, or would be ignored.
    """
    needed, optional = _SOURCES[kind]
    if finite and kind == "custom":
        needed = (*needed, "size")
    known = dict.fromkeys(key for keys in _SOURCES.values() for group in keys for key in group)
    missing = [f"{name}.{key}" for key in needed if getattr(section, key) is None]
    unused = [f"{name}.{key}" for key in known if key not in (*needed, *optional) and getattr(section, key)]
    if missing:
        raise ValueError(f"kind {kind!r} needs {' and '.join(missing)}")
    if unused:
        raise ValueError(f"kind {kind!r} does not use {' and '.join(unused)}")


class ModelSection(Section):
    """The policy that is trained."""

    path: FilePath = Field(
        description="Hugging Face folder of the policy: config.json, safetensors, tokenizer and chat template. The "
        "trainer starts from it and the engines serve it."
    )
    head_dtype: Literal["model", "float32"] = Field(
        default="float32",
        description="Type of the output logits, in trainer and engines alike: float32, or that of the weights, which "
        "in half precision rounds every logprob on each side by itself.",
    )


class DataSection(Section):
    """Where prompts come from."""

    kind: PromptKind = Field(
        default="jsonl",
        description="Source of the prompts: a file, a reasoning-gym task that makes them, or a class of your own.",
    )
    path: FilePath | None = Field(default=None, description="The file, for the kinds jsonl and parquet.")
    source: DottedPath | None = Field(
        default=None,
        description="Dotted path of your own data source, `package.module:Name`, for the kind custom: a class with the "
        "methods of vime-rollout's `DataSource`, made with the options as keyword arguments.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of your own data source.")
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
        check_source(self, "data", self.kind)
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
        "the whole one, so guards.logprob_difference_action must not be stop.",
    )
    top_k: int = Field(default=-1, ge=-1, description="Sample from the k likeliest tokens only; -1 from all. As top_p.")
    stop: Words = Field(default=(), description="Strings that end a response.")
    stop_token_ids: Ids = Field(default=(), description="Token ids that end a response, besides the model's own.")
    seed: NonNegativeInt = Field(default=0, description="Seed from which the seed of every request is derived.")
    concurrency: Count = Field(default=256, description="Samples in work at one time, over all engines.")
    samples_per_request: Count | None = Field(
        default=None,
        description="Most samples of a prompt in one request to an engine; all when absent. An engine takes as many as "
        "it runs at a time (max_num_seqs); those that end early count towards concurrency until the last has ended.",
    )
    request_deadline_s: Positive = Field(default=600.0, description="Seconds after which a request is given up.")
    retries: NonNegativeInt = Field(
        default=2, description="How often a failed request is sent again before the step fails."
    )
    over_sample: NonNegativeInt = Field(
        default=0,
        description="Prompts begun beyond batch_size. The step takes the first batch_size groups that are finished and "
        "pass the filter; what is then still running is aborted, or kept with rollout.partial.",
    )
    filter: str | None = Field(
        default=None,
        description="Which finished groups may be trained on: differing_rewards (drops groups whose rewards are all "
        "equal: they have no gradient), or the dotted path of your own, `package.module:function`.",
    )
    filter_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of your own filter.")
    generate: DottedPath | None = Field(
        default=None,
        description="Dotted path of your own generate function, `package.module:function`: turns, tools, agents.",
    )
    generate_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of your own generate function."
    )
    partial: bool = Field(
        default=False,
        description="Cut generations that the step does not need any more and continue them in the next one, with the "
        "weights of then: their tokens are of several versions.",
    )
    mask_off_policy: bool = Field(
        default=False,
        description="Do not train on tokens that older weights sampled than those in training; they stay in the "
        "context and in the loss's denominators.",
    )
    max_turns: Count = Field(
        default=1, description="Most turns of the policy in one sample, for generate functions with several turns."
    )

    @field_validator("filter")
    @classmethod
    def _filter_can_be_found(cls, value: str | None) -> str | None:
        if value in (None, "differing_rewards") or re.fullmatch(r"[A-Za-z_][\w.]*[:.][A-Za-z_]\w*", value):
            return value
        raise ValueError(f'{value!r} is neither "differing_rewards" nor a dotted path, `package.module:function`')

    @model_validator(mode="after")
    def _options_have_their_function(self) -> RolloutSection:
        if self.filter_options and self.filter in (None, "differing_rewards"):
            raise ValueError(f"rollout.filter_options are for a filter of your own; rollout.filter is {self.filter!r}")
        if self.generate_options and self.generate is None:
            raise ValueError("rollout.generate_options are for a generate function of your own; there is none")
        return self

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

    count: NonNegativeInt = Field(
        default=1,
        description="Number of engines that the run starts and stops, each a vLLM server process; 0 with engine.urls.",
    )
    urls: Words = Field(
        default=(),
        description="Engines started by somebody else, such as http://host:8000, with vime-sync's arguments and what "
        "model.head_dtype asks for, `--hf-overrides.head_dtype float32`. They are asked whether they fit before "
        "anything starts, used, and never stopped. engine.count must then be 0: the run either starts engines or is "
        "given them.",
    )
    router: bool = Field(
        default=False,
        description="Put vllm-router in front of the engines, with sticky sessions, instead of dealing requests out.",
    )
    restarts: NonNegativeInt = Field(
        default=2, description="How often in a run a dead or hanging engine is started again before the run fails."
    )
    sleep: Switch = Field(
        default="auto",
        description="Whether engines give their memory back while the trainer works: auto does so where they share "
        "a GPU.",
    )
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
    kv_cache_gib: Positive | None = Field(
        default=None,
        description="KV cache of each rank of an engine in GiB. Absent, it is 1 on a CPU, and on a GPU all that "
        "engine.gpu_memory_utilization leaves. Every pause of an engine costs about 60 ns a block of it.",
    )
    threads: NonNegativeInt = Field(
        default=0, description="CPU threads of one engine (CPU only); 0 shares out the cores."
    )
    extra_args: Words = Field(
        default=(),
        description="Further arguments of the vLLM server, as on its command line. Those that a setting stands for are "
        "refused, and --hf-overrides must repeat a model.head_dtype that it would undo.",
    )

    @property
    def cpu_kv_cache_gib(self) -> float:
        """KV cache of each rank of an engine on a CPU, GiB; there is no share of a device that would bound it."""
        return 1.0 if self.kv_cache_gib is None else self.kv_cache_gib

    @property
    def servers(self) -> int:
        """Engines that generate, whoever started them."""
        return self.count or len(self.urls)

    @model_validator(mode="after")
    def _engines_have_one_owner(self) -> EngineSection:
        if self.urls and self.count:
            raise ValueError(
                f"engine.urls names {len(self.urls)} engines that somebody else started and engine.count asks for "
                f"{self.count} to be started; set engine.count = 0, or remove the urls"
            )
        if not self.urls and not self.count:
            raise ValueError("engine.count is 0 and engine.urls names none; generation needs at least one engine")
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/\s?#]+", url):
                raise ValueError(f"engine.urls holds {url!r}; expected http://host:port, without a path")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.urls names an engine twice")
        return self


class RewardSection(Section):
    """How a sample is scored. Exactly one of name and path is set."""

    name: Literal["exact_match", "math_verify", "reasoning_gym"] | None = Field(
        default=None,
        description="Built-in reward: exact_match (the response equals the label), math_verify (mathematical equality "
        "of the final answer), reasoning_gym (the task's own scorer).",
    )
    path: DottedPath | None = Field(
        default=None,
        description="Dotted path of your own reward, `package.module:function`: `async def fn(sample) -> float`.",
    )
    timeout_s: Positive = Field(default=30.0, description="Seconds after which scoring one sample is given up.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward.")

    @model_validator(mode="after")
    def _one_reward(self) -> RewardSection:
        if (self.name is None) == (self.path is None):
            raise ValueError("set exactly one of reward.name and reward.path")
        return self
