"""What is measured: each arm's name and settings; plain values only, so that the driver needs no torch."""

from __future__ import annotations

from typing import Any

QWEN3: dict[str, dict[str, Any]] = {
    "1.7B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "8B-15": {  # 15 of the 36 layers: 49.7 GB of masters and moments, what a rank of DP 2 holds of the 8B model
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 15,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 16, "vocab_size": 512,
    },
}  # fmt: skip

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip

EVEN = [4096] * 4
MIXED = [5000, 3300, 2600, 1800, 1300, 900, 700, 400, 250, 134]  # 16384 tokens, as a rollout's lengths differ


def _train(**changes: Any) -> dict[str, Any]:
    base = {"kind": "train", "shape": "1.7B", "documents": EVEN, "steps": 6, "budget": 16384, "settings": {}}
    settings = {"recompute": "none", "logprob_chunk_tokens": 2048, **changes.pop("settings", {})}
    return base | changes | {"settings": settings}


TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
ARMS: dict[str, dict[str, Any]] = {
    "ceilings": {"kind": "ceilings"},
    "attention": {"kind": "attention"},
    "kernels": {"kind": "kernels"},
    "logprobs": {"kind": "logprobs"},
    "train-full": _train(settings={"recompute": "full"}),
    "train-selective": _train(settings={"recompute": "selective"}, offload=True),
    "train-none": _train(profile=True),
    "train-none-varlen": _train(settings={"attention": "varlen"}),
    "train-none-torch": _train(settings={"kernels": "torch"}, profile=True),
    "train-mixed": _train(documents=MIXED),
    "train-8b-tp2": _train(shape="8B", world=2, steps=5, profile=True, offload=True, settings=TP2),
    "train-8b-dp2": _train(
        shape="8B", world=2, steps=4, documents=[4096] * 8, budget=8192, distributed=True, profile=True, offload=True,
        settings={"recompute": "selective"},
    ),
    "vocabulary": {"kind": "vocabulary"},
    "compare": _train(steps=1, compare={"rounds": 2, "steps": 4}, profile=True),
    "offload-8b": _train(shape="8B-15", documents=[2048], budget=2048, steps=2, cycles=5, pinning=True),
    "compare-tiny": _train(
        shape="tiny", documents=[40, 30, 20], steps=1, budget=128, compare={"rounds": 2, "steps": 2}, cycles=3,
        profile=True,
    ),
    "train-tiny": _train(shape="tiny", documents=[40, 30, 20], steps=3, budget=128, profile=True, offload=True),
}  # fmt: skip


def ranks_of(arm: str) -> int:
    """Return how many processes an arm needs."""
    return int(ARMS[arm].get("world", 1))
