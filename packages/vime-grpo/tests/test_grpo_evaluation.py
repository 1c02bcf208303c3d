"""pass@k is unbiased, and evaluations are means over prompts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.errors import BatchError
from vime_grpo.evaluation import evaluation_metrics, pass_at_k


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_solution(case: tuple[int, int, int]) -> None:
    samples, solved, k = case
    subsets = list(itertools.combinations([1] * solved + [0] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.integers(1, 4), st.floats(0.05, 0.95))
def test_pass_at_k_is_unbiased(k: int, probability: float) -> None:
    samples = 6
    expectation = sum(
        math.comb(samples, c) * probability**c * (1 - probability) ** (samples - c) * pass_at_k(samples, c, k)
        for c in range(samples + 1)
    )
    assert expectation == pytest.approx(1 - (1 - probability) ** k)


def test_pass_at_k_of_many_samples_neither_overflows_nor_leaves_its_range() -> None:
    assert pass_at_k(100_000, 50, 1) == pytest.approx(0.0005)
    assert pass_at_k(100_000, 0, 1000) == 0.0
    assert pass_at_k(10, 10, 10) == 1.0
    assert 0 < pass_at_k(100_000, 1, 99_999) <= 1


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_estimates_are_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(BatchError, match=rf"k = {case[2]}, {case[1]} of 4 samples solved"):
        pass_at_k(*case)


def test_an_evaluation_by_hand() -> None:
    rewards = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 0.5, 0.5]}
    assert evaluation_metrics(rewards, pass_k=(1, 2)) == {
        "eval/reward": pytest.approx(0.5),
        "eval/reward_sem": pytest.approx(0.25),
        "eval/pass@1": pytest.approx(0.375),
        "eval/pass@2": pytest.approx((0.5 + 5 / 6) / 2),
        "eval/prompts": 2.0,
        "eval/samples": 8.0,
    }
    assert evaluation_metrics(rewards, solved_at=0.5)["eval/pass@1"] == pytest.approx(0.625)
    assert evaluation_metrics({"a": [0.5]})["eval/reward_sem"] == 0.0


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ({}, "nothing was evaluated"),
        ({"a": [1.0]}, r"prompt 'a'\); seen: rewards \[1.0\]; expected: at least 2"),
        ({"a": [1.0, math.nan]}, "nan"),
    ],
)
def test_what_cannot_be_evaluated_is_named(rewards: dict[str, list[float]], text: str) -> None:
    with pytest.raises(BatchError, match=text):
        evaluation_metrics(rewards, pass_k=(2,))
