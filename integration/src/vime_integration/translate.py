"""The run's configuration, said in the terms of vime-rollout.

The packages do not know each other's configuration; what one key of the run means to a part is written down here, once.
"""

from __future__ import annotations

import dataclasses
import json

from vime_grpo import RunConfig
from vime_rollout import DataConfig, RolloutConfig, RowKeys, SamplingParams


def data_config(config: RunConfig) -> DataConfig:
    """Translate the run's configuration into the data source's own."""
    data, rollout = config.data, config.rollout
    gym = data.kind == "reasoning_gym"
    return DataConfig(
        path=None if gym else str(data.path),
        keys=RowKeys(prompt=data.prompt_key, label=data.label_key, metadata=data.metadata_key),
        gym_task=data.task if gym else None,
        gym_seed=data.seed,
        gym_size=data.size or 1,
        gym_options=data.task_config,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
        shuffle=data.shuffle,
        seed=data.seed,
        max_prompt_tokens=rollout.max_context_tokens - rollout.max_response_tokens,
        overlong=data.overlong,
    )


def rollout_config(config: RunConfig) -> RolloutConfig:
    """Translate the run's configuration into the rollout's own."""
    section = config.rollout
    return RolloutConfig(
        samples_per_prompt=section.samples_per_prompt,
        sampling=SamplingParams(
            max_tokens=section.max_response_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop=section.stop,
            stop_token_ids=section.stop_token_ids,
        ),
        max_context_tokens=section.max_context_tokens,
        seed=section.seed,
        concurrency=section.concurrency,
        step_deadline_s=step_deadline(config),
        samples_per_request=section.samples_per_request,
        request_deadline_s=section.request_deadline_s,
        max_turns=section.max_turns,
        # The samples of a prompt share its keys and values when one engine has them all.
        sticky_groups=config.engine.servers > 1,
    )


def head_arguments(config: RunConfig) -> list[str]:
    """Return the engine's arguments that make its logits what the trainer's are; none where they are float32 anyway.

    The sources of vLLM 0.28, 0.29 and 0.32 compute a generating model's logits in this type, and refuse where the head
    is quantised. A platform without the type falls back to the weights' with a warning in the engine's log.
    """
    if config.model.head_dtype == "model" or config.engine.dtype == "float32":
        return []
    return ["--hf-overrides", json.dumps({"head_dtype": config.model.head_dtype})]


def cache_arguments(config: RunConfig) -> list[str]:
    """Return what bounds the KV cache of an engine on a GPU, each rank's, where ``engine.kv_cache_gib`` does."""
    size = config.engine.kv_cache_gib
    return [] if size is None else ["--kv-cache-memory-bytes", str(int(size * 2**30))]


def step_deadline(config: RunConfig) -> float:
    """Return the seconds that one rollout may take: every wave of requests at its own deadline, and one to spare.

    Where engines are started again, requests wait for that as long as it may take, as often as it may happen.
    """
    section = config.rollout
    mending = config.engine.restarts * return_deadline(config)
    waves = -(-section.batch_size * section.samples_per_prompt // section.concurrency)
    return (waves + 1) * section.max_turns * section.request_deadline_s + config.reward.timeout_s + mending


def return_deadline(config: RunConfig) -> float:
    """Return the seconds that a request waits for an engine that is started again; 0 where none is."""
    engine = config.engine
    if engine.urls or not engine.restarts:
        return 0.0
    return engine.start_deadline_s + config.sync.deadline_s


def evaluation_data_config(config: RunConfig) -> DataConfig:
    """Return the data source of the evaluation: its own prompts, in order, with the run's template and lengths."""
    section = config.evaluation
    gym = section.kind == "reasoning_gym"
    return dataclasses.replace(
        data_config(config),
        path=None if gym else str(section.path),
        keys=RowKeys(prompt=section.prompt_key, label=section.label_key),
        gym_task=section.task if gym else None,
        gym_seed=section.seed,
        gym_size=section.size or 1,
        gym_options=section.task_config,
        shuffle=False,
        seed=section.seed,
    )


def evaluation_sampling(config: RunConfig) -> SamplingParams:
    """Return how the evaluation samples: as training does, at a temperature of its own and from all tokens."""
    sampling = rollout_config(config).sampling
    return dataclasses.replace(sampling, temperature=config.evaluation.temperature, top_p=1.0, top_k=-1)
