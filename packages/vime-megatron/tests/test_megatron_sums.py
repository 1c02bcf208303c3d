"""Gradients that products add themselves, and the layer around the residual stream, against Megatron's own way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from vime_megatron import logprobs, sft_loss
from vime_megatron.kernels import plain
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


def test_the_update_in_one_pass_is_torch_s(make_trainer, tiny_tied, batch, tmp_path):
    """Weight decay, clipping, warm-up and a checkpoint between; both leave the same state under the same names."""
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "warmup_steps": 2}
    runs = []
    for adamw in (plain.adamw, None):
        trainer = make_trainer(tiny_tied, dtype="bfloat16", optimizer=optimizer)
        trainer._kernels = replace(trainer._kernels, adamw=adamw)
        trainer.step(batch, sft_loss)
        trainer.save(tmp_path / str(adamw is None))
        trainer.step(batch, sft_loss)
        trainer.load(tmp_path / str(adamw is None))
        for _ in range(2):
            trainer.step(batch, sft_loss)
        inner = trainer.optimizer.chained_optimizers[0].optimizer
        state = [(m, *(inner.state[m][k] for k in ("exp_avg", "exp_avg_sq", "step"))) for m in masters_of(inner)]
        runs.append((state, {name: param.detach().clone() for name, param in trainer.params.items()}))
    for found, wanted in zip(runs[0][0], runs[1][0], strict=True):
        assert float(found[3]) == float(wanted[3]) == 3
        for a, b in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    for name, wanted in runs[1][1].items():
        torch.testing.assert_close(runs[0][1][name], wanted, rtol=0.01, atol=1e-3, msg=name)


def masters_of(inner):
    return [master for group in inner.param_groups for master in group["params"]]
