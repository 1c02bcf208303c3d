"""Gradients that products add themselves, and the layer around the residual stream, against Megatron's own way."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from vime_megatron import logprobs, sft_loss
from vime_megatron.model.layer import DecoderLayer


def gradients_of(trainer, batch):
    trainer.step(batch, sft_loss)
    return {name: param.main_grad.clone() for name, param in trainer.params.items()}


def returned(hidden_tm, weight_vm, *rest, **options):
    """Log-probabilities whose weight has no buffer to add to."""
    return logprobs.token_logprobs(hidden_tm, weight_vm.view_as(weight_vm), *rest, **options)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "qwen3-moe-tied"])
def test_sums_in_the_buffer_are_those_that_hooks_add(make_trainer, model_of, batch, kind, monkeypatch):
    trainer = make_trainer(model_of(kind), max_tokens_per_microbatch=32, logprob_chunk_tokens=5)
    found = gradients_of(trainer, batch)
    trainer = make_trainer(model_of(kind), max_tokens_per_microbatch=32, logprob_chunk_tokens=5)
    for module in trainer.model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            assert module.gradient_accumulation_fusion
            module.gradient_accumulation_fusion = False
    monkeypatch.setattr("vime_megatron.forward.token_logprobs", returned)
    for name, wanted in gradients_of(trainer, batch).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7, msg=name)


def test_one_micro_batch_is_the_same_to_the_bit(make_trainer, tiny_tied, batch, monkeypatch):
    """In bfloat16 the vocabulary's gradient is not rounded any more; all others are the default's."""
    settings = {"dtype": "bfloat16", "max_tokens_per_microbatch": 128, "optimizer": {"clip_grad": 0.0}}
    trainer = make_trainer(tiny_tied, **settings)
    found = gradients_of(trainer, batch)
    trainer = make_trainer(tiny_tied, **settings)
    for module in trainer.model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
    monkeypatch.setattr("vime_megatron.forward.token_logprobs", returned)
    for name, wanted in gradients_of(trainer, batch).items():
        if "embedding" in name:
            assert not torch.equal(found[name], wanted)
            torch.testing.assert_close(found[name], wanted, rtol=0.01, atol=1e-3)
        else:
            assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_the_layer_is_megatron_s(make_trainer, model_of, batch, kind, recompute, monkeypatch):
    found = gradients_of(make_trainer(model_of(kind), recompute=recompute), batch)
    monkeypatch.setattr(DecoderLayer, "forward", TransformerLayer.forward)
    for name, wanted in gradients_of(make_trainer(model_of(kind), recompute=recompute), batch).items():
        assert torch.equal(found[name], wanted), name
