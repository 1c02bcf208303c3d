"""Models by their shape alone: a HF folder without weights, and a trainer's flat buffer with random ones.

The buffer is laid out as the engine stacks its rows ([q; k; v], [gate; up]), so the same source serves planned copies
and aliased weights. Tensors start on multiples of 128 elements.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vime_sync import Box, CheckpointTensor, Region, WeightSource, shared_empty
from vime_sync.layout import Piece, contiguous_strides, whole

VOCABULARY = 151936
ALIGN = 128
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "dtype": "float32",
    },
}


def config_of(shape: str) -> dict[str, Any]:
    """The HF configuration of a shape (untied embeddings)."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "dtype": "bfloat16",
        **SHAPES[shape],
    }


def model_folder(shape: str, folder: Path) -> Path:
    """Write configuration and a small tokenizer, no weights.

    Args:
        shape: A key of `SHAPES`.
        folder: Where.

    Returns:
        The folder.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {f"w{i}": i for i in range(3, 256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 (not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
    )
    fast.save_pretrained(folder)
    return folder


def tensors_of(shape: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes, in the order in which the buffer holds them."""
    c = config_of(shape)
    h, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], h)}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, q),
            at + "self_attn.q_norm.weight": (d,),
            at + "self_attn.k_norm.weight": (d,),
            at + "mlp.gate_proj.weight": (f, h),
            at + "mlp.up_proj.weight": (f, h),
            at + "mlp.down_proj.weight": (h, f),
            at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
        }
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (c["vocab_size"], h)}


@dataclass(frozen=True)
class Trainer:
    """A stand-in for a trainer: the buffer that its optimiser would write.

    Attributes:
        flat: The buffer.
        source: What lies in it.
    """

    flat: torch.Tensor
    source: WeightSource

    def fill(self, seed: int) -> None:
        """Write weights that depend on a seed only."""
        generator = torch.Generator(self.flat.device).manual_seed(seed)
        for tensor in self.source.tensors:
            view = self.source.view(tensor.pieces[0].region)
            if len(tensor.shape) == 1:
                view.fill_(1.0)
            else:
                view.normal_(0, 0.02, generator=generator)
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)


def make_trainer(shape: str, device: torch.device) -> Trainer:
    """Allocate and fill the buffer.

    Args:
        shape: A key of `SHAPES`.
        device: Where; on a CPU the buffer is shared memory.

    Returns:
        The trainer.
    """
    dtype = getattr(torch, config_of(shape)["dtype"])
    placed, end = [], 0
    for name, extent in tensors_of(shape).items():
        region = Region(0, "flat", end, extent, contiguous_strides(extent))
        placed.append(CheckpointTensor(name, extent, dtype, (Piece(whole(extent), region),)))
        end += -(-math.prod(extent) // ALIGN) * ALIGN
    flat = shared_empty(end, dtype) if device.type == "cpu" else torch.zeros(end, dtype=dtype, device=device)
    if device.type == "cpu":
        flat.zero_()
    trainer = Trainer(flat, WeightSource.from_regions({"flat": flat}, placed))
    trainer.fill(1)
    return trainer


def piece_boxes(source: WeightSource) -> list[tuple[str, Box, tuple[int, ...], Region]]:
    """Every piece as (name, box, full shape, region)."""
    return [(t.name, p.box, t.shape, p.region) for t in source.tensors for p in t.pieces]
