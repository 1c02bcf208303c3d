"""Batch plans: everything once, within the budget, the same on all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vime_megatron import BatchError, TrainSequence
from vime_megatron.batch import check_batch, plan_batch

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(lengths, st.integers(1, 4), st.integers(1, 60))
def test_a_plan_holds_every_sequence_once_and_keeps_the_budget(sizes, ranks, budget):
    plan = plan_batch(sizes, ranks=ranks, max_tokens=budget)
    flat = [index for mine in plan.microbatches for row in mine for index in row]
    assert sorted(flat) == list(range(len(sizes)))
    assert {len(mine) for mine in plan.microbatches} == {plan.count}
    for row in (row for mine in plan.microbatches for row in mine):
        assert sum(sizes[i] for i in row) <= budget or len(row) == 1
    assert plan == plan_batch(sizes, ranks=ranks, max_tokens=budget)


@given(lengths, st.integers(1, 4))
def test_ranks_are_balanced_by_cost(sizes, ranks):
    plan = plan_batch(sizes, ranks=ranks, max_tokens=10**6, cost=lambda n: float(n * n))
    loads = [sum(sizes[i] ** 2 for row in mine for i in row) for mine in plan.microbatches]
    assert max(loads) - min(loads) <= max(sizes) ** 2


def test_the_cost_of_a_sequence_is_its_forward_pass(make_trainer, tiny, batch_of, monkeypatch):
    trainer = make_trainer(tiny)
    shape = trainer.shape
    matrices = sum(param.numel() for name, param in trainer.params.items() if param.dim() == 2 and "word" not in name)
    attention = sum(2 * 2 * (position + 1) * 32 for position in range(1000)) * shape.layers
    assert shape.forward_flops(1000) == pytest.approx(2 * matrices * 1000 + attention, rel=1e-3)
    monkeypatch.setattr(trainer, "topology", dataclasses.replace(trainer.topology, dp_size=2))
    plan = trainer._plan(batch_of((60, 10, 10, 10, 10, 10, 10, 10)))  # 70 tokens of short ones cost what 60 in a row do
    assert [sorted(i for row in mine for i in row) for mine in plan.microbatches] == [[0], [1, 2, 3, 4, 5, 6, 7]]


def test_a_sequence_longer_than_the_budget_goes_alone():
    plan = plan_batch([3, 50, 4], ranks=1, max_tokens=10)
    assert (1,) in plan.microbatches[0]


def test_a_rank_without_work_gets_idle_microbatches():
    plan = plan_batch([5], ranks=3, max_tokens=10)
    assert plan.microbatches == (((0,),), ((),), ((),))


@pytest.mark.parametrize(
    ("sequences", "text"),
    [
        ([], "empty batch"),
        ([TrainSequence(torch.arange(3)), TrainSequence(torch.arange(9))], "sequence 1 of 2.*9 tokens"),
        ([TrainSequence(torch.tensor([1, 99]))], "sequence 0 of 1.*1 to 99"),
        ([TrainSequence(torch.tensor([-1]))], "-1"),
        (
            [TrainSequence(torch.arange(2), {"weight": torch.ones(2)}), TrainSequence(torch.arange(2))],
            "sequence 1.*fields|fields differ",
        ),
    ],
)
def test_bad_batches_are_refused_by_name(sequences, text):
    with pytest.raises(BatchError, match=text):
        check_batch(sequences, max_length=8, vocab_size=50)


@pytest.mark.parametrize("tokens", [torch.arange(4)[None], torch.arange(4.0), torch.empty(0, dtype=torch.int64)])
def test_bad_tokens_are_refused(tokens):
    with pytest.raises(BatchError, match="bad tokens"):
        TrainSequence(tokens)


def test_a_field_of_another_length_is_refused():
    with pytest.raises(BatchError, match="'reward'"):
        TrainSequence(torch.arange(4), {"reward": torch.ones(3)})
