"""Batch plans: everything once, within the budget, the same on all ranks."""

from __future__ import annotations

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
