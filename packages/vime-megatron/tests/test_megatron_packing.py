"""Packed documents: nothing crosses a border, neither by position nor by attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from vime_megatron.model.core_attention import sdpa_attention
from vime_megatron.model.packing import inverse_frequencies, pack

CPU = torch.device("cpu")
FREQUENCIES = inverse_frequencies(8, 10000.0)


def row_of(lengths):
    return pack([torch.arange(n) for n in lengths], inverse_frequencies=FREQUENCIES, device=CPU)


def inputs(tokens, heads=4, groups=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, 8), (tokens, groups, 8), (tokens, groups, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_each_document_is_attended_alone(lengths):
    row = row_of(lengths)
    q, k, v = inputs(sum(lengths))
    out = sdpa_attention(q, k, v, row)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = [x[part].transpose(0, 1)[None] for x in (q, k, v)]
        wanted = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[part], wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(row.positions_t[part], torch.arange(length))
        start += length


def test_a_nan_in_one_document_does_not_reach_the_others():
    lengths = [5, 9, 6, 1]
    row = row_of(lengths)
    q, k, v = inputs(sum(lengths))
    clean = sdpa_attention(q, k, v, row)
    for x in (q, k, v):
        x[5:14] = float("nan")
    out = sdpa_attention(q, k, v, row)
    others = torch.cat((torch.arange(5), torch.arange(14, 21)))
    assert torch.equal(out[others], clean[others])
    assert out[5:14].isnan().all()


@pytest.mark.parametrize("changed", range(3))
def test_changing_a_document_changes_no_other(make_trainer, tiny, batch_of, changed):
    trainer = make_trainer(tiny)
    batch = batch_of((7, 12, 5))
    before = trainer.logprobs(batch)
    batch[changed].tokens[:] = (batch[changed].tokens + 1) % 61
    after = trainer.logprobs(batch)
    for index in range(3):
        same = torch.equal(before[index], after[index])
        assert same is (index != changed)
