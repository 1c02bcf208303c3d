"""Derivatives by finite differences, a vocabulary split over ranks, and the clipping inside torch's fused AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from vime_megatron import sft_loss
from vime_megatron.kernels import plain
from vime_megatron.kernels.plain import HeadLayout
from vime_megatron.logprobs import VocabShard, token_logprobs
from vime_megatron.optim import inner_optimizers


def wide(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_gated_silu():
    assert torch.autograd.gradcheck(plain.gated_silu, (wide(3, 10),))


@pytest.mark.parametrize("normed", [True, False])
def test_query_key_value(normed):
    layout = HeadLayout(heads=2, groups=1, width=4, eps=1e-6)
    angles = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = (wide(4, seed=2), wide(4, seed=3)) if normed else (None, None)

    def split(qkv, q_weight, k_weight):
        return plain.query_key_value(qkv, q_weight, k_weight, angles.cos(), angles.sin(), layout)

    assert torch.autograd.gradcheck(split, (wide(3, 16), *weights))


@pytest.mark.parametrize(("chunk", "rows"), [(2, 7), (9, 7), (3, 5)], ids=["chunks", "whole", "padded"])
def test_logprobs_and_entropies(chunk, rows):
    """The custom backward pass, which recomputes logits chunk by chunk, against finite differences."""
    targets = torch.tensor([0, 4, 2, 2, 1])
    shard = VocabShard(start=0, rows=rows, group=None, chunk=chunk)

    def logprobs(hidden, weight):
        return token_logprobs(hidden, weight, targets, temperature=0.7, shard=shard)

    assert torch.autograd.gradcheck(logprobs, (wide(5, 3), wide(7, 3, seed=1)))


def test_a_vocabulary_split_over_ranks_gives_the_numbers_of_one(ranks):
    """Three ranks, the last with padding only in part: values on all alike, gradients each its share."""
    hidden, weight, targets, pull = _problem()
    shard = VocabShard(start=0, rows=11, group=None, chunk=3)
    wanted = token_logprobs(hidden, weight, targets, temperature=1.3, shard=shard)
    grads = torch.autograd.grad((torch.stack(wanted) * pull).sum(), (hidden, weight))
    results = ranks("split_vocabulary", 3, problem=[x.detach() for x in (hidden, weight, targets, pull)])
    for result in results:
        for found, value in zip(result["values"], wanted, strict=True):
            torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(sum(result["hidden"] for result in results), grads[0])
    torch.testing.assert_close(torch.cat([result["weight"] for result in results])[:11], grads[1])


def _problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 3, 4, 7, 8, 10, 10, 1])
    return hidden, weight, targets, torch.randn(2, 8, generator=generator, dtype=torch.float64)


def test_fused_adamw_clips_as_the_separate_pass_does(make_trainer, tiny, batch):
    """Torch's one-pass AdamW divides by ``grad_scale`` as it reads; it exists on CPUs too."""
    runs = []
    for fused in (False, True):
        trainer = make_trainer(tiny, optimizer={"lr": 1e-2, "clip_grad": 1e-2, "eps": 1.0})
        for inner in inner_optimizers(trainer.optimizer):
            for group in inner.param_groups:
                group.update(fused=fused, foreach=False)
        norms = [trainer.step(batch, sft_loss).grad_norm for _ in range(2)]
        assert min(norms) > 1e-2  # or nothing was clipped
        runs.append((norms, {name: param.detach().clone() for name, param in trainer.params.items()}))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    for name, weight in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], weight, rtol=1e-6, atol=1e-8)
    unclipped = make_trainer(tiny, optimizer={"lr": 1e-2, "clip_grad": 0.0, "eps": 1.0})
    for _ in range(2):
        unclipped.step(batch, sft_loss)
    moved = max(float((unclipped.params[name] - weight).abs().max()) for name, weight in runs[0][1].items())
    assert moved > 1e-6
    assert math.isfinite(moved)
