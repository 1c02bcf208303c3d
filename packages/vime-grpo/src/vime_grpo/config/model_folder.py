"""Does the layout fit the model? Reads the model folder's config.json; needs no torch and no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime_grpo.config.run import RunConfig
from vime_grpo.errors import ConfigError


def check_model_folder(config: RunConfig) -> None:
    """Check the settings that depend on the model: parallel sizes and context length.

    Args:
        config: A resolved configuration.

    Raises:
        ConfigError: The folder is not a model, or the layout or the context does not fit it.
    """
    facts = _read(config.model.path)
    problems = []
    for section, size in (("trainer", config.trainer.tensor_parallel), ("engine", config.engine.tensor_parallel)):
        problems += _tensor_parallel_problems(facts, section, size)
    problems += _sharing_problems(facts, config)
    limit = facts.get("max_position_embeddings")
    if isinstance(limit, int) and config.engine.max_model_len is not None and config.engine.max_model_len > limit:
        problems.append(
            f"engine.max_model_len ({config.engine.max_model_len}, by default rollout.max_context_tokens) is above the "
            f"model's max_position_embeddings ({limit})"
        )
    if problems:
        raise ConfigError(
            "the settings do not fit the model", where=str(config.model.path / "config.json"), seen="; ".join(problems)
        )


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    where = f"model.path = {folder}"
    fix = "set model.path to a Hugging Face model folder (with config.json, safetensors and tokenizer)"
    if not folder.is_dir():
        raise ConfigError("the model folder does not exist", where=where, fix=fix)
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
        raise ConfigError("not a model folder", where=where, seen=names, expected="config.json", fix=fix) from error
    except (OSError, ValueError) as error:
        raise ConfigError("the model's config.json cannot be read", where=where, seen=str(error), fix=fix) from error
    if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
        raise ConfigError("the model's config.json names no model_type", where=where, fix=fix)
    return facts


def _tensor_parallel_problems(facts: dict[str, Any], section: str, size: int) -> list[str]:
    heads = facts.get("num_attention_heads")
    kv_heads = facts.get("num_key_value_heads", heads)
    # Where the layers are experts, the dense width stands in the file too, and no matrix has it.
    width = "moe_intermediate_size" if "moe_intermediate_size" in facts else "intermediate_size"
    inner = facts.get(width)
    problems = []
    if isinstance(heads, int) and heads % size:
        problems.append(f"{section}.tensor_parallel ({size}) does not divide the model's {heads} attention heads")
    # Megatron cuts the key-value heads; vLLM cuts them or gives each to several ranks.
    if isinstance(kv_heads, int) and kv_heads % size and (section == "trainer" or size % kv_heads):
        problems.append(f"{section}.tensor_parallel ({size}) does not divide the model's {kv_heads} key-value heads")
    if isinstance(inner, int) and inner % size:
        problems.append(f"{section}.tensor_parallel ({size}) does not divide the model's {width} {inner}")
    return problems


def _sharing_problems(facts: dict[str, Any], config: RunConfig) -> list[str]:
    problems = []
    layers, stages = facts.get("num_hidden_layers"), config.trainer.pipeline_parallel
    if isinstance(layers, int) and layers % stages:
        problems.append(f"trainer.pipeline_parallel ({stages}) does not divide the model's {layers} layers")
    problems += _context_problems(facts, config)
    # Families name the number of experts differently; a dense model has none of the keys.
    experts = next((facts[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in facts), 0)
    shares = config.trainer.expert_parallel
    if shares > 1 and not experts:
        problems.append(f"trainer.expert_parallel is {shares}, and the model has no experts")
    elif isinstance(experts, int) and experts % shares:
        problems.append(f"trainer.expert_parallel ({shares}) does not divide the model's {experts} experts")
    return problems


def _context_problems(facts: dict[str, Any], config: RunConfig) -> list[str]:
    """Context-parallel ranks share the heads that tensor parallelism leaves each; few key-value heads are repeated."""
    heads = facts.get("num_attention_heads")
    kv_heads = facts.get("num_key_value_heads", heads)
    tensor, context = config.trainer.tensor_parallel, config.trainer.context_parallel
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % tensor or kv_heads % tensor:
        return []
    queries, keys = heads // tensor, kv_heads // tensor
    if queries % context == 0 and (keys % context == 0 or context % keys == 0):
        return []
    return [
        f"trainer.context_parallel ({context}) does not suit the {queries} attention heads and {keys} key-value heads "
        f"that trainer.tensor_parallel ({tensor}) leaves a rank"
    ]
