"""A configuration of ours in TRL's terms; pure, and importable without TRL.

Three kinds of settings: those that TRL has (by another name, often), those that it has not and without which another
algorithm would run, which are refused, and those that cost speed or rounding only, which are told of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from vime_grpo import ConfigError, RunConfig

#: TRL's normalisation of the loss by our name of it.
LOSS_TYPES = {"sample_mean": "grpo", "token_mean": "dapo", "horizon": "dr_grpo"}
CORRECTIONS = {"tis": "truncate", "mis": "mask"}


class EngineKind(StrEnum):
    """What generates."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Translation:
    """A configuration in TRL's terms.

    Attributes:
        arguments: Keyword arguments of ``GRPOConfig``.
        not_carried: What TRL does otherwise, one sentence each.
    """

    arguments: dict[str, Any]
    not_carried: tuple[str, ...]


def refuse_unknown(config: RunConfig) -> None:
    """Refuse what would be another algorithm in TRL.

    Args:
        config: The run.

    Raises:
        ConfigError: Names the setting.
    """
    algorithm, rollout = config.algorithm, config.rollout
    corrected = algorithm.correction != "none"
    known = {
        "data.kind": (config.data.kind != "custom", "a file or a reasoning-gym task"),
        "algorithm.advantage": (algorithm.advantage == "grpo", "grpo"),
        "algorithm.policy_loss": (algorithm.policy_loss == "clip", "clip"),
        "algorithm.old_logprobs": (algorithm.old_logprobs == "recompute", "recompute"),
        "algorithm.kl_kind": (algorithm.kl_coef == 0 or algorithm.kl_kind in ("k3", "low_var_kl"), "k3 or low_var_kl"),
        "algorithm.kl_target": (algorithm.kl_coef == 0 or algorithm.kl_target == "reference", "reference"),
        "algorithm.correction": (not corrected or algorithm.correction in CORRECTIONS, "none, tis or mis"),
        "algorithm.correction_level": (
            not corrected or algorithm.correction_level in ("token", "sequence"),
            "token or sequence",
        ),
        "trainer.lr_schedule": (
            config.trainer.lr_schedule != "linear" or config.trainer.min_learning_rate == 0,
            "constant, cosine, or linear down to 0",
        ),
        "rollout.filter": (rollout.filter is None and rollout.over_sample == 0, "no filter and no over_sample"),
        "rollout.generate": (rollout.generate is None and rollout.max_turns == 1, "one turn"),
        "rollout.partial": (not rollout.partial, "false"),
    }
    for name, (carried, expected) in known.items():
        if not carried:
            section, key = name.split(".")
            raise ConfigError(
                "TRL has no word for this setting",
                where=name,
                seen=repr(getattr(getattr(config, section), key)),
                expected=expected,
                fix="compare on a configuration that both can run",
            )


def micro_batch_size(config: RunConfig, wanted: int = 0) -> int:
    """Return how many samples TRL pads into one micro-batch.

    Args:
        config: The run.
        wanted: Samples asked for; 0 takes as many as our own token budget holds at full length.

    Raises:
        ConfigError: The samples of an optimiser step do not divide by it.
    """
    per_update, rest = divmod(
        config.rollout.batch_size * config.rollout.samples_per_prompt, config.algorithm.steps_per_rollout
    )
    if wanted and not rest and per_update % wanted == 0:
        return wanted
    if wanted or rest:
        raise ConfigError(
            "samples do not divide into micro-batches",
            seen=f"{per_update} samples (and {rest} over) an optimiser step, {wanted or 'any'} a micro-batch",
            expected="a divisor",
        )
    fit = max(1, config.trainer.max_tokens_per_microbatch // config.rollout.max_context_tokens)
    return max(size for size in range(1, min(fit, per_update) + 1) if per_update % size == 0)


def translate(config: RunConfig, engine: EngineKind, *, micro_batch: int = 0, sleep: bool = False) -> Translation:
    """Say a configuration in TRL's terms.

    Args:
        config: The run.
        engine: What generates.
        micro_batch: Samples of a padded micro-batch; 0 for our own token budget.
        sleep: Let vLLM give its memory back while the trainer works.

    Raises:
        ConfigError: TRL cannot run it.
    """
    refuse_unknown(config)
    size = micro_batch_size(config, micro_batch)
    rollout, updates = config.rollout, config.algorithm.steps_per_rollout
    samples = rollout.batch_size * rollout.samples_per_prompt
    arguments = {
        "max_steps": config.pipeline.steps * updates,
        "num_generations": rollout.samples_per_prompt,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": samples // updates // size,
        "steps_per_generation": samples // size,
        "max_completion_length": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),
        "shuffle_dataset": False,  # our data source has shuffled
        "use_vllm": engine is EngineKind.VLLM,
        "seed": config.trainer.seed,
        **_objective(config, engine),
        **_optimiser(config),
    }
    stops = {"stop": list(rollout.stop), "stop_token_ids": list(rollout.stop_token_ids)}
    if stops := {name: values for name, values in stops.items() if values}:
        if engine is EngineKind.TRANSFORMERS:
            raise ConfigError("stops need an engine", where="rollout.stop", seen=str(stops), fix="use --engine vllm")
        arguments["generation_kwargs"] = stops
    if engine is EngineKind.VLLM:
        arguments |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": config.engine.gpu_memory_utilization,
            "vllm_max_model_length": rollout.max_context_tokens,
            "vllm_enable_sleep_mode": sleep,
        }
    return Translation(arguments, tuple(_differences(config, engine)))


def _objective(config: RunConfig, engine: EngineKind) -> dict[str, Any]:
    algorithm = config.algorithm
    corrected = algorithm.correction != "none" and engine is EngineKind.VLLM
    arguments: dict[str, Any] = {
        "loss_type": LOSS_TYPES[algorithm.loss_aggregation],
        "scale_rewards": "group" if algorithm.normalize_std else "none",
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "delta": algorithm.clip_dual or None,
        "beta": algorithm.kl_coef,
        "use_bias_correction_kl": False,
        "entropy_coef": algorithm.entropy_coef,
        "importance_sampling_level": algorithm.ratio_level,
        "vllm_importance_sampling_correction": corrected,
    }
    if corrected:
        arguments |= {
            "vllm_importance_sampling_mode": f"{algorithm.correction_level}_{CORRECTIONS[algorithm.correction]}",
            "vllm_importance_sampling_clip_max": algorithm.correction_high,
            "vllm_importance_sampling_clip_min": algorithm.correction_low or None,
        }
    return arguments


def _optimiser(config: RunConfig) -> dict[str, Any]:
    trainer = config.trainer
    schedule, more = trainer.lr_schedule, {}
    if schedule == "constant":
        schedule_name = "constant_with_warmup" if trainer.warmup_steps else "constant"
    elif schedule == "cosine" and trainer.min_learning_rate:
        schedule_name, more = "cosine_with_min_lr", {"min_lr": trainer.min_learning_rate}
    else:
        schedule_name = schedule
    return {
        "learning_rate": trainer.learning_rate,
        "lr_scheduler_type": schedule_name,
        "lr_scheduler_kwargs": more or None,
        "warmup_steps": trainer.warmup_steps,
        "weight_decay": trainer.weight_decay,
        "adam_beta1": trainer.adam_beta1,
        "adam_beta2": trainer.adam_beta2,
        "adam_epsilon": trainer.adam_eps,
        "max_grad_norm": trainer.clip_grad,
        # As TRL recommends: weights in float32, computed with in bfloat16. Our weights are bfloat16 with a copy in
        # float32 that the optimiser steps on; bfloat16 weights alone would lose small steps.
        "bf16": trainer.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "gradient_checkpointing": trainer.activation_recompute == "full",
    }


def _differences(config: RunConfig, engine: EngineKind) -> list[str]:
    told = [
        "a micro-batch is padded to its longest sequence; ours are packed",
        "samples have no seeds of their own: all draw from one seed of the engine",
        "advantages are divided by the group's deviation + 1e-4; by ours + 1e-6",
    ]
    if config.trainer.dtype == "bfloat16":
        told.append("weights are float32 under bfloat16 autocast; ours are bfloat16 with a float32 copy to step on")
    if engine is EngineKind.VLLM:
        told.append("TRL fixes max_num_batched_tokens at 4096, and max_num_seqs at the samples of a rollout")
        if config.engine.enforce_eager:
            told.append("TRL has no setting for engine.enforce_eager: its engine compiles and captures graphs")
        if config.engine.dtype == "float32" or config.engine.dtype != _folder_dtype(config.model.path):
            told.append("engine.dtype is left to vLLM: the model folder's, or a half one where that is float32")
        if config.algorithm.correction == "none":
            told.append("the difference of logprobs is not computed: TRL has it only with its correction, which costs")
    if config.algorithm.kl_coef and config.algorithm.kl_kind == "low_var_kl":
        told.append("the KL estimate is k3 without a bound")
    if config.algorithm.steps_per_rollout > 1:
        told.append("samples are dealt to the optimiser steps one by one; ours by whole groups")
    if config.trainer.activation_recompute == "selective":
        told.append("nothing is recomputed: TRL recomputes layers whole or not at all")
    if config.pipeline.mode != "colocated":
        told.append(f"TRL's colocated mode takes turns; pipeline.mode is {config.pipeline.mode}")
    if config.evaluation.every:
        told.append("nothing is evaluated in between")
    return told


def _folder_dtype(folder: Path) -> str:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(values.get("dtype") or values.get("torch_dtype"))
