"""The pieces that the mappings of the supported families are put together from.

Most decoders name their checkpoint tensors alike, so a family lists the blocks it has; one that differs writes its own
:class:`~vime_megatron.families.mapping.Rule`.
"""

from __future__ import annotations

from vime_megatron.families.mapping import Part, Rule

_LAYER = "decoder.layers.{L}."
_HF_LAYER = "model.layers.{L}."


def decoder_ends() -> tuple[Rule, ...]:
    """Embedding, final norm and output projection (when tied: the embedding again, on a last stage that has none)."""
    return (
        Rule("embedding.word_embeddings.weight", (Part("model.embed_tokens.weight", ("vocab", "hidden"), split=0),)),
        Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),)),
        Rule("output_layer.weight", (Part("lm_head.weight", ("vocab", "hidden"), split=0),), when="untied"),
        Rule("output_layer.weight", (Part("model.embed_tokens.weight", ("vocab", "hidden"), split=0),), when="tied"),
    )


def norms() -> tuple[Rule, ...]:
    """The two norms of a layer."""
    return (
        Rule(_LAYER + "input_layernorm.weight", (Part(_HF_LAYER + "input_layernorm.weight", ("hidden",)),)),
        Rule(_LAYER + "pre_mlp_layernorm.weight", (Part(_HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),)),
    )


def attention() -> tuple[Rule, ...]:
    """Attention with the projections stacked ``[q; k; v]``; biases and head norms where the model has them."""
    to, source = _LAYER + "self_attention.", _HF_LAYER + "self_attn."
    return (
        Rule(
            to + "linear_qkv.weight",
            (
                Part(source + "q_proj.weight", ("q", "hidden"), split=0),
                Part(source + "k_proj.weight", ("kv", "hidden"), split=0),
                Part(source + "v_proj.weight", ("kv", "hidden"), split=0),
            ),
        ),
        Rule(
            to + "linear_qkv.bias",
            (
                Part(source + "q_proj.bias", ("q",), split=0),
                Part(source + "k_proj.bias", ("kv",), split=0),
                Part(source + "v_proj.bias", ("kv",), split=0),
            ),
            when="qkv_bias",
        ),
        Rule(to + "q_layernorm.weight", (Part(source + "q_norm.weight", ("head",)),), when="qk_norm"),
        Rule(to + "k_layernorm.weight", (Part(source + "k_norm.weight", ("head",)),), when="qk_norm"),
        Rule(to + "linear_proj.weight", (Part(source + "o_proj.weight", ("hidden", "q"), split=1),)),
    )


def dense_mlp() -> tuple[Rule, ...]:
    """Gated feed-forward, stacked ``[gate; up]``."""
    to, source = _LAYER + "mlp.", _HF_LAYER + "mlp."
    return (
        Rule(
            to + "linear_fc1.weight",
            (
                Part(source + "gate_proj.weight", ("ffn", "hidden"), split=0),
                Part(source + "up_proj.weight", ("ffn", "hidden"), split=0),
            ),
        ),
        Rule(to + "linear_fc2.weight", (Part(source + "down_proj.weight", ("hidden", "ffn"), split=1),)),
    )


def expert_mlp() -> tuple[Rule, ...]:
    """Router, and experts one after the other: ``[gate; up]`` of each in one stack, ``down`` of each in another."""
    to, source = _LAYER + "mlp.", _HF_LAYER + "mlp."
    return (
        Rule(to + "router.weight", (Part(source + "gate.weight", ("experts", "hidden")),)),
        Rule(
            to + "experts_fc1",
            (
                Part(source + "experts.{X}.gate_proj.weight", ("ffn", "hidden"), split=0),
                Part(source + "experts.{X}.up_proj.weight", ("ffn", "hidden"), split=0),
            ),
        ),
        Rule(to + "experts_fc2", (Part(source + "experts.{X}.down_proj.weight", ("hidden", "ffn"), split=1),)),
    )
