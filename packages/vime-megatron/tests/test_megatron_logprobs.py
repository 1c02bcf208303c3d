"""Chunked logprobs and entropies equal the dense ones, with their gradients, whatever the chunk."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vime_megatron.logprobs import VocabShard, token_logprobs


def dense(hidden, weight, targets, temperature):
    logp = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 23), st.integers(2, 19), st.integers(1, 30), st.floats(0.3, 3.0), st.integers(0, 3))
def test_values_and_gradients_equal_the_dense_ones(tokens, vocab, chunk, temperature, padding):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    hidden = torch.randn(tokens, 6, generator=generator, requires_grad=True)
    weight = torch.randn(vocab + padding, 6, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    pull = torch.randn(2, tokens, generator=generator)
    shard = VocabShard(start=0, rows=vocab, group=None, chunk=chunk)
    found = token_logprobs(hidden, weight, targets, temperature=temperature, shard=shard)
    gradients = torch.autograd.grad((torch.stack(found) * pull).sum(), (hidden, weight))
    wanted = dense(hidden, weight[:vocab], targets, temperature)
    expected = torch.autograd.grad((torch.stack(wanted) * pull).sum(), (hidden, weight))
    for a, b in zip((*found, *gradients), (*wanted, *expected), strict=True):
        scale = max(1.0, float(b.abs().max()))  # a small difference of large terms has their rounding
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * scale)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    shard = VocabShard(start=0, rows=3, group=None, chunk=1)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0]), temperature=1.0, shard=shard)
    assert logprobs.tolist() == pytest.approx([0.0, -2e4])
    assert entropy.tolist() == pytest.approx([0.0, 0.0])
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_half_precision_weights_get_a_float32_softmax():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator).bfloat16()
    weight = torch.randn(50, 16, generator=generator).bfloat16()
    targets = torch.arange(7)
    shard = VocabShard(start=0, rows=50, group=None, chunk=3)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, shard=shard)
    assert logprobs.dtype is entropy.dtype is torch.float32
    wanted, _ = dense(hidden.float(), weight.float(), targets, 1.0)
    torch.testing.assert_close(logprobs, wanted, rtol=0.02, atol=0.02)


def test_float32_logits_leave_only_the_rounding_of_states_and_rows():
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(64, 16, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(50, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.arange(64) % 50
    wanted, _ = dense(hidden.double(), weight.double(), targets, 1.0)
    expected = torch.autograd.grad(wanted.sum(), (hidden, weight))
    errors = {}
    for wide in (False, True):
        shard = VocabShard(start=0, rows=50, group=None, chunk=5, float32_logits=wide)
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, shard=shard)
        gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        assert [g.dtype for g in gradients] == [torch.bfloat16] * 2
        for found, exact in zip(gradients, expected, strict=True):
            assert (found - exact).norm() < 0.02 * exact.norm()
        errors[wide] = float((logprobs - wanted).abs().max())
    assert errors[True] < 1e-5 < 1e-2 < errors[False], "logits of 16 and more have steps of an eighth in bfloat16"


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that exist, but for those that were there before."""

    def __init__(self, *known):
        super().__init__()
        self._bytes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self._bytes:
                self._bytes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return out


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("tokens", [64, 512])
def test_peak_memory_is_three_float32_chunks_however_long_the_row(dtype, wide, tokens):
    vocab, chunk, width = 4000, 16, 4
    hidden, weight = torch.randn(tokens, width).to(dtype).requires_grad_(), torch.randn(vocab, width).to(dtype)
    weight = weight.requires_grad_()
    weight.main_grad = torch.zeros(vocab, width)
    shard = VocabShard(start=0, rows=vocab, group=None, chunk=chunk, float32_logits=wide)
    targets = torch.arange(tokens)
    with Alive(hidden, weight, weight.main_grad, targets) as alive:
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, shard=shard)
        (logprobs.sum() + entropy.sum()).backward()
    factors = 2 * vocab * width * 4 + 64 * tokens  # a product of the weight's shape; vectors of the row's length
    assert alive.peak < 3 * chunk * vocab * 4 + factors
    assert alive.peak > 2 * chunk * vocab * 4  # or nothing was counted


def test_only_a_chunk_of_logits_exists_at_a_time(monkeypatch):
    import vime_megatron.logprobs as module

    sizes = []
    original = module._logits

    def spy(*arguments):
        logits = original(*arguments)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(module, "_logits", spy)
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    shard = VocabShard(start=0, rows=100, group=None, chunk=8)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), temperature=1.0, shard=shard)
    logprobs.sum().backward()
    assert max(sizes) == 8 * 100
    assert len(sizes) == 16
