"""Model families: one folder each, with the same two files (``config.py``, ``mapping.py``).

A family is data: how its ``config.json`` reads as a :class:`~vime_megatron.families.shape.ModelShape`, and the rules
that say where its checkpoint tensors lie. The modules are shared (:mod:`vime_megatron.model`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_megatron.errors import ModelError
from vime_megatron.families import llama, qwen2, qwen3, qwen3_moe
from vime_megatron.families.mapping import Rule
from vime_megatron.families.shape import ModelShape, read_config


@dataclass(frozen=True)
class Family:
    """One supported kind of model.

    Attributes:
        architecture: Hugging Face class name.
        shape_of: Reads ``config.json``.
        rules: Its mapping.
    """

    architecture: str
    shape_of: Callable[[Mapping[str, Any]], ModelShape]
    rules: tuple[Rule, ...]


_FAMILIES = {
    module.ARCHITECTURE: Family(module.ARCHITECTURE, module.shape_of, module.RULES)
    for module in (llama, qwen2, qwen3, qwen3_moe)
}

# Settings that tell what an unknown architecture has and the supported ones have not.
_TRAITS = {
    "kv_lora_rank": "multi-head latent attention",
    "n_routed_experts": "another kind of mixture of experts",
    "num_local_experts": "another kind of mixture of experts",
    "vision_config": "an image encoder",
    "audio_config": "an audio encoder",
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "attn_logit_softcapping": "capped attention logits",
    "final_logit_softcapping": "capped output logits",
    "is_encoder_decoder": "an encoder",
    "quantization_config": "quantised weights",
}


def check_model(folder: Path | str) -> ModelShape:
    """Tell whether a model folder is one that the trainer can build, before anything is started.

    Args:
        folder: Hugging Face folder; only its ``config.json`` is read.

    Returns:
        The model's shape.

    Raises:
        ModelError: Not a model folder, or an architecture or setting that is not supported.
    """
    return load_family(Path(folder))[1]


def load_family(folder: Path) -> tuple[Family, ModelShape]:
    """Find the family of a model folder and read its shape.

    Args:
        folder: Hugging Face folder.

    Returns:
        The family and the model's shape.

    Raises:
        ModelError: Not a model folder, or an architecture or setting that is not supported.
    """
    config = read_config(folder)
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            family = _FAMILIES[name]
            try:
                return family, family.shape_of(config)
            except KeyError as error:
                raise ModelError("config.json lacks a setting", where=str(folder), seen=f"no {error}") from error
            except (TypeError, ValueError) as error:
                raise ModelError("config.json has a bad setting", where=str(folder), seen=str(error)) from error
    raise ModelError(
        "unsupported architecture",
        where=str(folder),
        seen=(", ".join(map(str, names)) or "no architectures in config.json") + _differences(config),
        expected="one of " + ", ".join(sorted(_FAMILIES)),
        fix="a family is two files of data: see vime_megatron/families/qwen3",
    )


def _differences(config: Mapping[str, Any]) -> str:
    """Say what is visibly other than in a decoder that could be supported by data alone."""
    traits = {text: None for key, text in _TRAITS.items() if config.get(key)}
    activation = config.get("hidden_act", config.get("hidden_activation", "silu"))
    if activation != "silu":
        traits[f"activation {activation}"] = None
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        traits["layers of type " + ", ".join(sorted(kinds))] = None
    return f"; it differs in: {', '.join(traits)}" if traits else ""
