"""The numbers that describe a decoder, read from a Hugging Face ``config.json``.

One :class:`ModelShape` serves every family: what the families differ in (norms of queries and keys, biases, tied
embeddings, experts) are fields of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_megatron.errors import ModelError

_ROPE_THETA = 10000.0  # of every supported family, where the file names none


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary frequencies (arXiv 2407.21783; the rule is in Meta's reference model).

    Waves longer than ``positions / low`` are slowed by ``factor``, those shorter than ``positions / high`` are left;
    between the two the share changes linearly with the number of turns that fit in ``positions``.

    Attributes:
        factor: How much the longest waves are slowed.
        low: Turns within ``positions`` below which a frequency is slowed in full.
        high: Turns within ``positions`` above which a frequency stays.
        positions: Length that the model was first trained on.
    """

    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with rotary positions, RMS norms and gated SiLU feed-forward.

    Attributes:
        architecture: The Hugging Face class name, such as ``Qwen3ForCausalLM``.
        layers: Number of decoder layers.
        hidden: Width of the residual stream.
        ffn: Width of the feed-forward, of one expert's where there are experts.
        heads: Query heads.
        kv_heads: Key and value heads; queries share them in groups.
        head_dim: Width of a head.
        vocab: Rows of the embedding.
        max_positions: Longest sequence the model was made for.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMS norms.
        tied: The output projection is the embedding.
        qk_norm: Queries and keys pass an RMS norm per head.
        qkv_bias: The query, key and value projections have biases.
        experts: Experts of a layer; 0: the feed-forward is dense.
        experts_per_token: Experts that a token goes to.
        normalise_experts: The weights of a token's experts are scaled to sum to 1.
        rope_scaling: How the rotary frequencies are rescaled; ``None``: they are not.
        init_std: Standard deviation of random initial weights.
    """

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = False
    rope_scaling: Llama3Scaling | None = None
    init_std: float = 0.02

    @property
    def untied(self) -> bool:
        """The output projection has weights of its own."""
        return not self.tied

    @property
    def dims(self) -> dict[str, int]:
        """The named sizes that a family's mapping is written in."""
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "head": self.head_dim,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "experts": self.experts,
        }

    def forward_flops(self, tokens: int) -> float:
        """Count the work of one forward pass over a document: what is linear in its length, and causal attention.

        Args:
            tokens: Length of the document.

        Returns:
            Floating-point operations, a multiplication and an addition counted as two.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        feed_forward = 3 * self.hidden * self.ffn * (self.experts_per_token or 1) + self.hidden * self.experts
        weights = self.layers * (self.hidden * (2 * q + 2 * kv) + feed_forward) + self.hidden * self.vocab
        return 2.0 * weights * tokens + 2.0 * self.layers * q * tokens**2


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's ``config.json``.

    Args:
        folder: Hugging Face folder.

    Returns:
        The parsed object.

    Raises:
        ModelError: The folder or the file is missing, or is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        seen = "no such folder" if not folder.is_dir() else "no config.json in it"
        raise ModelError("not a model folder", where=str(folder), seen=seen, fix="give a Hugging Face model folder")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError("config.json is not JSON", where=str(path), seen=str(error)) from error
    if not isinstance(config, dict):
        raise ModelError("config.json is not a JSON object", where=str(path), seen=type(config).__name__)
    return config


def rope_theta(config: Mapping[str, Any]) -> float:
    """Return the rotary base, from the old (``rope_theta``) or the new (``rope_parameters``) place.

    Args:
        config: Parsed ``config.json``.

    Returns:
        The base; transformers' default when the file names none.
    """
    return float(_rope(config).get("rope_theta", config.get("rope_theta", _ROPE_THETA)))


def rope_scaling(config: Mapping[str, Any], *, llama3: bool = False) -> Llama3Scaling | None:
    """Return how the rotary frequencies are rescaled.

    Args:
        config: Parsed ``config.json``.
        llama3: The family may use Llama 3's scaling.

    Returns:
        The scaling, or ``None``.

    Raises:
        ModelError: The file asks for a scaling that is not built; it is never approximated.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    allowed = ["default", "llama3"] if llama3 else ["default"]
    if kind not in allowed or partial != 1.0:
        raise ModelError(
            "unsupported rotary scaling",
            where="config.json",
            seen=f"rope_type {kind!r}, partial_rotary_factor {partial}",
            expected=" or ".join(map(repr, allowed)) + ", over the whole head",
        )
    if kind == "default":
        return None
    length = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low=float(rope["low_freq_factor"]),
        high=float(rope["high_freq_factor"]),
        positions=int(config.get("original_max_position_embeddings", length)),  # as transformers takes them
    )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings: ``rope_parameters``, or ``rope_scaling`` in files from before transformers 5.

    Where a file has both, transformers and vLLM take the old name and forget the new one, its base included. Somebody
    has then edited the file, so the two must say the same.
    """
    told = {name: _told(config, config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    tables = list(told.values())
    seen = " and ".join(f"{name} {config[name]!r}" for name in told)
    if any(isinstance(value, Mapping) for table in tables for value in table.values()):
        raise ModelError("unsupported rotary settings", where="config.json", seen=seen, expected="one for all layers")
    if len(tables) > 1 and tables[0] != tables[1]:
        raise ModelError(
            "the rotary settings are there twice and differ",
            where="config.json",
            seen=seen,
            expected="rope_scaling or rope_parameters",
            fix="remove the one that the model was not trained with",
        )
    return tables[0] if tables else {}


def _told(config: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of rotary settings with what it leaves to defaults, and to the file around it."""
    defaults = {"rope_type": table.get("type", "default"), "rope_theta": config.get("rope_theta", _ROPE_THETA)}
    return {name: value for name, value in (defaults | dict(table)).items() if name != "type"}


def decoder_shape(config: Mapping[str, Any], architecture: str, **special: Any) -> ModelShape:
    """Read what every supported family's ``config.json`` says alike.

    Args:
        config: Parsed ``config.json``.
        architecture: The family's class name.
        special: Fields of :class:`ModelShape` that the family reads or knows itself.

    Returns:
        The shape.

    Raises:
        ModelError: A setting has a value that no family supports.
    """
    require(config, {"hidden_act": "silu", "use_sliding_window": False, "quantization_config": None})
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ModelError(
            "unsupported layers", where="config.json", seen=", ".join(sorted(kinds)), expected="full_attention only"
        )
    heads = int(config["num_attention_heads"])
    fields: dict[str, Any] = {
        "layers": int(config["num_hidden_layers"]),
        "hidden": int(config["hidden_size"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or config["hidden_size"] // heads),
        "vocab": int(config["vocab_size"]),
        "max_positions": int(config["max_position_embeddings"]),
        "rope_theta": rope_theta(config),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }
    if "ffn" not in special:
        fields["ffn"] = int(config["intermediate_size"])
    if "rope_scaling" not in special:
        fields["rope_scaling"] = rope_scaling(config)
    shape = ModelShape(architecture=architecture, **fields | special)
    _check_sizes(shape)
    return shape


def _check_sizes(shape: ModelShape) -> None:
    """Refuse sizes that no layer can be built of."""
    chosen = shape.experts_per_token
    wrong = {
        f"num_attention_heads={shape.heads}, which num_key_value_heads={shape.kv_heads} does not divide": bool(
            shape.heads % shape.kv_heads
        ),
        f"head_dim={shape.head_dim}, which has no halves to rotate": bool(shape.head_dim % 2),
        f"num_experts_per_tok={chosen} of {shape.experts} experts": not 0 <= chosen <= shape.experts,
        "num_experts_per_tok=1 with norm_topk_prob, whose weight is 1 whatever the router says": (
            chosen == 1 and shape.normalise_experts
        ),
    }
    seen = "; ".join(text for text, holds in wrong.items() if holds)
    if seen:
        raise ModelError("impossible sizes", where="config.json", seen=seen)


def require(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse settings whose other values this package does not build.

    Args:
        config: Parsed ``config.json``.
        wanted: The one supported value of each setting; a setting that is absent passes.

    Raises:
        ModelError: A setting differs; the text lists each one.
    """
    wrong = {name: config[name] for name, value in wanted.items() if config.get(name, value) != value}
    if wrong:
        raise ModelError(
            "unsupported model settings",
            where="config.json",
            seen=", ".join(f"{name}={value!r}" for name, value in wrong.items()),
            expected=", ".join(f"{name}={wanted[name]!r}" for name in wrong),
        )
