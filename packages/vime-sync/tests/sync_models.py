"""Tiny HF models made by code: configurations, random weights under HF names, and trainers laid out as engines are."""

import math

import torch
from vime_sync import CheckpointTensor, Piece, Region, WeightSource, shared_empty
from vime_sync.layout import contiguous_strides, whole

VOCABULARY = 64
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
    "dtype": "float32",
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def checkpoint(config, seed):
    """Random weights under HF names, large enough that greedy tokens depend on them."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    h, d, f = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, q),
            at + "self_attn.q_norm.weight": (d,),
            at + "self_attn.k_norm.weight": (d,),
            at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
        }
        if config["model_type"] == "qwen3_moe":
            m = config["moe_intermediate_size"]
            shapes[at + "mlp.gate.weight"] = (config["num_experts"], h)
            for expert in range(config["num_experts"]):
                to = f"{at}mlp.experts.{expert}."
                shapes |= {
                    to + "gate_proj.weight": (m, h),
                    to + "up_proj.weight": (m, h),
                    to + "down_proj.weight": (h, m),
                }
        else:
            shapes |= {
                at + "mlp.gate_proj.weight": (f, h),
                at + "mlp.up_proj.weight": (f, h),
                at + "mlp.down_proj.weight": (h, f),
            }
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        made[name] = ((1 + 0.1 * noise) if len(shape) == 1 else 0.3 * noise).to(dtype)
    return made


def laid_out(config, *, padded_words):
    """A source whose one shared buffer holds a dense Qwen3 as vLLM wants it: [q; k; v], [gate; up], padded words."""
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in checkpoint(config, 0).items()}
    first = [name for name in shapes if name.endswith(("q_proj.weight", "gate_proj.weight"))]
    order = [name for name in shapes if not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))]
    tensors, end = [], 0
    for name in order:
        parts = [name]
        if name in first:
            old, others = ("q_proj", ("k_proj", "v_proj")) if "q_proj" in name else ("gate_proj", ("up_proj",))
            parts += [name.replace(old, other) for other in others]
        for part in parts:
            shape, dtype = shapes[part]
            region = Region(0, "flat", end, shape, contiguous_strides(shape))
            tensors.append(CheckpointTensor(part, shape, dtype, (Piece(whole(shape), region),)))
            rows = padded_words if "embed_tokens" in part else shape[0]
            end += rows * math.prod(shape[1:])
        end += -end % 128
    flat = shared_empty(end, tensors[0].dtype)
    flat.zero_()
    return WeightSource.from_regions({"flat": flat}, tensors)


def fill(source, config, seed):
    """Write a checkpoint into a source's buffers."""
    values = checkpoint(config, seed)
    for tensor in source.tensors:
        source.view(tensor.pieces[0].region).copy_(values[tensor.name])
