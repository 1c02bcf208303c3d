"""Advantages: by identity, exactly zero where nothing is to be learnt, and what each estimator promises."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.advantages import ADVANTAGES, group_advantages
from vime_grpo.errors import BatchError, ConfigError

rewards = st.floats(-100, 100, allow_nan=False, width=32)
batches = st.lists(st.tuples(st.sampled_from("abcde"), rewards), min_size=1, max_size=24)


def test_grpo_by_hand() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 1.0], ["a"] * 4)
    std = math.sqrt(4 * 0.25 / 3)  # of a sample: n - 1
    expected = [0.5 / (std + 1e-6), -0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.5 / (std + 1e-6)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)
    assert got.dtype == torch.float32


def test_dr_grpo_keeps_the_unit_of_the_reward() -> None:
    assert group_advantages([3.0, 1.0], ["a", "a"], normalize_std=False).tolist() == [1.0, -1.0]


def test_rloo_baseline_is_the_mean_of_the_others() -> None:
    got = group_advantages([1.0, 2.0, 6.0], ["a"] * 3, estimator="rloo", normalize_std=False)
    assert got.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_unequal_interleaved_groups_are_computed_apart() -> None:
    ids = ["a", "b", "a", "b", "b"]
    got = group_advantages([0.0, 5.0, 2.0, 5.0, 8.0], ids, normalize_std=False)
    assert got.tolist() == pytest.approx([-1, -1, 1, -1, 2])


@pytest.mark.parametrize("estimator", ADVANTAGES.names())
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_and_single_samples_give_exactly_zero(estimator: str, normalize_std: bool) -> None:
    got = group_advantages([0.1, 0.1, 0.1, 7.0], ["a", "a", "a", "b"], estimator=estimator, normalize_std=normalize_std)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


@given(batches, st.sampled_from(ADVANTAGES.names()), st.booleans(), st.randoms(use_true_random=False))
def test_order_does_not_matter(
    batch: list[tuple[str, float]], estimator: str, normalize_std: bool, rng: random.Random
) -> None:
    order = list(range(len(batch)))
    rng.shuffle(order)
    options = {"estimator": estimator, "normalize_std": normalize_std}
    straight = group_advantages([r for _, r in batch], [g for g, _ in batch], **options)
    shuffled = group_advantages([batch[i][1] for i in order], [batch[i][0] for i in order], **options)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-4, atol=1e-4)


@given(batches, st.sampled_from(ADVANTAGES.names()))
def test_advantages_of_a_group_sum_to_zero(batch: list[tuple[str, float]], estimator: str) -> None:
    ids = [group for group, _ in batch]
    got = group_advantages([r for _, r in batch], ids, estimator=estimator)
    assert torch.isfinite(got).all()
    for group in set(ids):
        chosen = torch.tensor([g == group for g in ids])
        assert float(got[chosen].sum()) == pytest.approx(0, abs=1e-3)


@given(st.lists(rewards, min_size=2, max_size=8), st.floats(-50, 50), st.floats(0.5, 4))
def test_normalised_advantages_ignore_shift_and_scale(values: list[float], shift: float, scale: float) -> None:
    if max(values) - min(values) < 1e-2:
        return  # the guard of the division is felt where the deviation is of its order
    ids = ["a"] * len(values)
    moved = group_advantages([value * scale + shift for value in values], ids)
    torch.testing.assert_close(moved, group_advantages(values, ids), rtol=2e-3, atol=2e-3)


def test_errors_name_the_sample() -> None:
    with pytest.raises(BatchError, match=r"one reward and one group id"):
        group_advantages([1.0], ["a", "b"])
    with pytest.raises(BatchError, match=r"sample 1 of group 'q'.*nan"):
        group_advantages([1.0, float("nan")], ["a", "q"])
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'grp'.*did you mean 'grpo'"):
        group_advantages([1.0], ["a"], estimator="grp")
