"""Families: config.json in, a mapping that tiles parameters and covers the checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vime_megatron import ModelError
from vime_megatron.families import load_family
from vime_megatron.families.mapping import Layout, check_layout, checkpoint_names, padded_vocab, placements
from vime_megatron.families.qwen3 import RULES
from vime_megatron.families.shape import ModelShape
from vime_megatron.model.packing import inverse_frequencies

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def folder_with(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


def test_qwen3_is_read(tmp_path):
    family, shape = load_family(folder_with(tmp_path, CONFIG | {"rope_parameters": {"rope_theta": 5e5}}))
    assert family.architecture == "Qwen3ForCausalLM"
    assert (shape.heads, shape.kv_heads, shape.rope_theta, shape.tied, shape.qk_norm) == (4, 2, 5e5, False, True)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (CONFIG | {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*Qwen3ForCausalLM"),
        ({}, "no architectures"),
        (
            CONFIG | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "n_routed_experts": 256},
            "differs in: multi-head latent attention, another kind of mixture of experts",
        ),
        (CONFIG | {"architectures": ["GemmaX"], "hidden_act": "gelu"}, "differs in: activation gelu"),
        (CONFIG | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
        (CONFIG | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (CONFIG | {"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        (
            CONFIG | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "yarn"}},
            "'default' or 'llama3'",
        ),
        (CONFIG | {"hidden_act": "gelu", "use_sliding_window": True}, "hidden_act='gelu', use_sliding_window=True"),
        (CONFIG | {"attention_bias": True}, "attention_bias=True"),
        (CONFIG | {"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        (
            CONFIG | {"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            "there twice and differ.*rope_scaling.*yarn.*and rope_parameters.*default",
        ),
        (
            CONFIG | {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
            "there twice and differ",  # transformers would take the old table, and a base of 10,000
        ),
        (CONFIG | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "one for all layers"),
        ({key: value for key, value in CONFIG.items() if key != "hidden_size"}, "no 'hidden_size'"),
        (CONFIG | {"rope_theta": None}, "bad setting.*NoneType"),
        (CONFIG | {"num_key_value_heads": 3}, "num_attention_heads=4, which num_key_value_heads=3 does not divide"),
        (CONFIG | {"head_dim": 7}, "head_dim=7"),
        (CONFIG | MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
        (CONFIG | MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "1 whatever the router says"),
        ("{broken", "not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(tmp_path, config, text):
    with pytest.raises(ModelError, match=text):
        load_family(folder_with(tmp_path, config))


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD_ROPE = {("type" if name == "rope_type" else name): value for name, value in ROPE.items()}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": ROPE | {"rope_theta": 777.0, "original_max_position_embeddings": 32}},
        {"rope_scaling": OLD_ROPE | {"original_max_position_embeddings": 32}, "rope_theta": 777.0},
        {"rope_scaling": OLD_ROPE, "rope_parameters": ROPE, "rope_theta": 777.0},
        {"rope_parameters": ROPE},
        {"rope_parameters": ROPE | {"original_max_position_embeddings": 32}, "original_max_position_embeddings": 16},
    ],
    ids=["new", "old", "both", "defaults", "outside"],
)
def test_rotary_settings_are_read_as_transformers_reads_them(tmp_path, rope):
    reference = "transformers is the reference here, not a dependency"
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason=reference)
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | rope
    shape = load_family(folder_with(tmp_path, config))[1]
    wanted = llama.LlamaRotaryEmbedding(llama.LlamaConfig.from_pretrained(tmp_path)).inv_freq
    found = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_family(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_family(tmp_path)


def test_sizes_that_do_not_divide_are_named():
    shape = shape_with(tp=1, vocab=61, tied=False, bias=False)
    with pytest.raises(ModelError, match="key/value heads = 2"):
        check_layout(shape, tp_size=4, pp_size=1)
    with pytest.raises(ModelError, match="3 layers"):
        check_layout(shape, tp_size=1, pp_size=2)
    with pytest.raises(ModelError, match=r"expert_parallel.*a dense model"):
        check_layout(shape, tp_size=1, pp_size=1, ep_size=2)
    with pytest.raises(ModelError, match=r"expert_tensor_parallel.*a dense model"):
        check_layout(shape, tp_size=1, pp_size=1, whole_experts=True)
    with pytest.raises(ModelError, match=r"context_parallel.*4 query heads and 2 key/value heads.*that 3 divides"):
        check_layout(shape, tp_size=1, pp_size=1, cp_size=3)
    check_layout(shape, tp_size=1, pp_size=1, cp_size=4)  # each key/value head goes to two ranks


def shape_with(*, tp, vocab, tied, bias):
    return ModelShape(
        architecture="x", layers=3, hidden=6, ffn=4 * tp, heads=4 * tp, kv_heads=2 * tp, head_dim=2, vocab=vocab,
        max_positions=8, rope_theta=1.0, norm_eps=1e-6, tied=tied, qk_norm=True, qkv_bias=bias,
    )  # fmt: skip


@given(st.sampled_from([1, 2, 4]), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 1))
def test_placements_tile_parameters_and_cover_the_checkpoint(tp, vocab, tied, bias, pipeline):
    shape = shape_with(tp=tp, vocab=vocab, tied=tied, bias=bias)
    stages = [(0, 3, True, True)] if not pipeline else [(0, 1, True, False), (1, 2, False, True)]
    covered: dict[str, torch.Tensor] = {}
    for tp_rank in range(tp):
        for first, count, is_first, is_last in stages:
            layout = Layout(0, tp_rank, tp, first, count, is_first, is_last)
            filled: dict[str, torch.Tensor] = {}
            for place in placements(RULES, shape, layout):
                ends = tuple(stop for _, stop in place.local)
                rows = max(ends[0], filled[place.param].shape[0]) if place.param in filled else ends[0]
                grown = torch.zeros((rows, *ends[1:]), dtype=torch.int)
                if place.param in filled:
                    grown[: filled[place.param].shape[0]] = filled[place.param]
                grown[tuple(slice(*span) for span in place.local)] += 1
                filled[place.param] = grown
                seen = covered.setdefault(place.name, torch.zeros(place.shape, dtype=torch.bool))
                seen[tuple(slice(*span) for span in place.box)] = True
            assert all((count == 1).all() for count in filled.values())
    assert covered.keys() == checkpoint_names(RULES, shape)
    assert all(seen.all() for seen in covered.values())
    assert ("lm_head.weight" in covered) is not tied
    assert padded_vocab(shape, tp) % tp == 0


@pytest.mark.parametrize("change", [0.0, 1e-3])
def test_a_projection_beside_a_tied_embedding_is_its_copy(make_trainer, tiny_tied, tmp_path, change):
    weights = load_file(tiny_tied / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][-1, -1] += change
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_tied / "config.json").read_bytes())
    if change:
        with pytest.raises(
            ModelError, match=r"the output projection is not the embedding.*tie_word_embeddings is true"
        ):
            make_trainer(tmp_path)
    else:
        assert make_trainer(tmp_path).shape.tied


def test_a_folder_with_two_sets_of_weights_is_refused(make_trainer, tiny, tmp_path):
    """One saved over another in pieces: transformers would read the one, and vLLM the other."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    part = "model-00001-of-00001.safetensors"
    shutil.copy(tmp_path / "model.safetensors", tmp_path / part)
    names = load_file(tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, part)}))
    with pytest.raises(ModelError, match=r"two sets of weights.*model\.safetensors, which transformers reads"):
        make_trainer(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert make_trainer(tmp_path).params
