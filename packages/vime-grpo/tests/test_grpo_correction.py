"""Corrections of samples of another policy: by hand, at every level, and what holds for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from vime_grpo.correction import CORRECTIONS, LEVELS, importance_ratio
from vime_grpo.errors import BatchError
from vime_grpo.losses import ClipBounds, PolicyLoss
from vime_grpo.segments import Segments

ANY_LOGPROB = st.floats(-8, 0)


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Tensor]:
    """Fields of a packed micro-batch of one to four sequences, some tokens of weight 0."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    count = sum(lengths)

    def values(strategy: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=count, max_size=count)), dtype=torch.float64)

    return {
        "weight": values(st.sampled_from([0.0, 0.25, 1.0])),
        "advantage": values(st.floats(-2, 2)),
        "old_logprob": values(ANY_LOGPROB),
        "rollout_logprob": values(ANY_LOGPROB),
        "sequence": torch.tensor([float(i + 3) for i, n in enumerate(lengths) for _ in range(n)]),
    }


def run(loss: PolicyLoss, fields: dict[str, Tensor], logprobs: Tensor | None = None) -> tuple[float, Tensor, dict]:
    logprobs_t = (fields["old_logprob"] if logprobs is None else logprobs).clone().requires_grad_()
    value, sums = loss(logprobs_t, torch.zeros_like(logprobs_t), fields)
    value.backward()
    assert logprobs_t.grad is not None
    return value.item(), logprobs_t.grad, {name: item.item() for name, item in sums.items()}


def test_each_correction_by_hand() -> None:
    ratio_t = torch.tensor([0.25, 1.0, 3.0])
    expected = {
        "none": [1.0, 1.0, 1.0],
        "decoupled": [0.25, 1.0, 3.0],
        "tis": [0.5, 1.0, 2.0],
        "mis": [0.25, 1.0, 0.0],
        "icepop": [0.0, 1.0, 0.0],
    }
    assert set(expected) == set(CORRECTIONS.names())
    for name, factor in expected.items():
        assert CORRECTIONS.get(name)(ratio_t, 0.5, 2.0).tolist() == factor


def test_the_levels_by_hand() -> None:
    rollout_t = torch.tensor([-1.0, -1.0, -1.0, 9.0, -1.0])
    old_t = rollout_t + torch.tensor([2.0, 4.0, 3.0, 9.0, 0.5]).log()
    # Sequences of 2, 2 and 1 tokens; the fourth token is not trained on, so it is in no ratio.
    segments = Segments.of(torch.tensor([7.0, 7.0, 8.0, 8.0, 7.0]), torch.tensor([True, True, True, False, True]))
    ratios = {level: importance_ratio(old_t, rollout_t, level=level, segments=segments) for level in LEVELS}
    assert ratios["token"].tolist() == pytest.approx([2, 4, 3, 9, 0.5])
    assert ratios["sequence"].tolist() == pytest.approx([8, 8, 3, 3, 0.5])
    assert ratios["geometric"].tolist() == pytest.approx([math.sqrt(8), math.sqrt(8), 3, 3, 0.5])
    with pytest.raises(BatchError, match="needs the sequences"):
        importance_ratio(old_t, rollout_t, level="geometric")


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_have_no_gradient_and_no_infinity(level: str) -> None:
    old_t = torch.zeros(3, requires_grad=True)
    segments = Segments.of(torch.ones(3), torch.ones(3, dtype=torch.bool))
    ratio_t = importance_ratio(old_t, torch.tensor([-math.log(2), -1e4, -1e30]), level=level, segments=segments)
    assert not ratio_t.requires_grad
    assert torch.isfinite(ratio_t).all()


def test_a_dropped_sequence_leaves_the_others_as_they_are() -> None:
    rollout_t = torch.tensor([-1.0, -3.0, -1.0], dtype=torch.float64)
    fields = {
        "weight": torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),
        "advantage": torch.ones(3, dtype=torch.float64),
        "rollout_logprob": rollout_t,
        "old_logprob": torch.full((3,), -1.0, dtype=torch.float64),
        "sequence": torch.tensor([1.0, 1.0, 2.0]),
    }
    _, grad, sums = run(PolicyLoss(correction="mis", correction_level="sequence"), fields)
    assert grad.tolist() == [0.0, 0.0, -0.5]
    assert (sums["tis_maskfrac"], sums["tis_clipfrac"], sums["weight_sum"]) == (0.5, 0.5, 1.0)
    assert sums["tis"] == pytest.approx(0.5 * math.exp(2) + 0.5)
    # Token by token only the second leaves the bound; cut instead of dropped, it keeps the bound.
    _, grad, sums = run(PolicyLoss(correction="mis"), fields)
    assert grad.tolist() == [-0.25, 0.0, -0.5]
    _, grad, sums = run(PolicyLoss(correction="tis"), fields)
    assert grad.tolist() == [-0.25, -0.5, -0.5]
    assert (sums["tis_maskfrac"], sums["tis_clipfrac"]) == (0.0, 0.25)


def test_decoupled_ppo_clips_around_the_proximal_policy_and_weights_by_the_behaviour() -> None:
    behaviour, proximal = math.log(0.1), math.log(0.4)
    fields = {
        "weight": torch.ones(2, dtype=torch.float64),
        "advantage": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "rollout_logprob": torch.full((2,), behaviour, dtype=torch.float64),
        "old_logprob": torch.full((2,), proximal, dtype=torch.float64),
    }
    current = torch.full((2,), math.log(0.6), dtype=torch.float64)  # 1.5 times the proximal policy
    value, grad, sums = run(PolicyLoss(correction="decoupled", bounds=ClipBounds(0.2, 0.2)), fields, current)
    assert value == pytest.approx(4 * (-1.2 + 1.5))
    assert grad.tolist() == pytest.approx([0.0, 4 * 1.5])
    assert (sums["pg_clipfrac"], sums["tis_clipfrac"], sums["tis"]) == (1.0, 0.0, pytest.approx(8.0))


def test_sequence_ratios_are_gspo() -> None:
    old = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    fields = {
        "weight": torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),  # 1 / (N T_i)
        "advantage": torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64),
        "rollout_logprob": old,
        "old_logprob": old,
        "sequence": torch.tensor([1.0, 1.0, 2.0]),
    }
    current = old + torch.tensor([0.3, -0.1, 0.5], dtype=torch.float64)
    value, grad, sums = run(PolicyLoss(ratio_level="sequence", bounds=ClipBounds(0.2, 0.2)), fields, current)
    first = math.exp((0.3 - 0.1) / 2)  # within the clip; the second sequence, exp(0.5), is not
    assert value == pytest.approx(-(first + 1.2) / 2)
    assert grad.tolist() == pytest.approx([-first / 4, -first / 4, 0.0])
    assert sums["pg_clipfrac"] == pytest.approx(0.5)


@given(columns(), st.sampled_from(CORRECTIONS.names()), st.sampled_from(LEVELS), st.sampled_from(["token", "sequence"]))
def test_on_policy_every_correction_is_the_identity(
    fields: dict[str, Tensor], name: str, level: str, ratio_level: str
) -> None:
    fields = fields | {"rollout_logprob": fields["old_logprob"]}
    plain = run(PolicyLoss(ratio_level=ratio_level), fields)
    loss = PolicyLoss(ratio_level=ratio_level, correction=name, correction_level=level, correction_low=0.9)
    value, grad, sums = run(loss, fields)
    assert value == pytest.approx(plain[0])
    torch.testing.assert_close(grad, plain[1])
    if name != "none":
        assert (sums["tis_clipfrac"], sums["tis_maskfrac"], sums["tis_abs"]) == (0, 0, pytest.approx(0, abs=1e-12))
        assert sums["tis"] == pytest.approx(sums["weight_sum"])


@given(columns(), st.sampled_from(LEVELS), st.floats(0, 0.99), st.floats(1, 10))
def test_factors_stay_in_their_bounds(fields: dict[str, Tensor], level: str, low: float, high: float) -> None:
    segments = Segments.of(fields["sequence"], fields["weight"] != 0)
    ratio_t = importance_ratio(fields["old_logprob"], fields["rollout_logprob"], level=level, segments=segments)
    factors = {name: CORRECTIONS.get(name)(ratio_t, low, high) for name in CORRECTIONS.names()}
    assert (ratio_t > 0).all()
    assert torch.equal(factors["decoupled"], ratio_t)
    assert ((factors["tis"] >= low) & (factors["tis"] <= high)).all()
    for name, bottom in (("mis", 0.0), ("icepop", low)):
        kept_t = (ratio_t >= bottom) & (ratio_t <= high)
        assert torch.equal(factors[name], torch.where(kept_t, ratio_t, 0.0))
    if level != "token":  # a sequence is kept, cut or dropped as one
        for factor_t in factors.values():
            for sequence in fields["sequence"].unique():
                assert factor_t[fields["sequence"] == sequence].unique().numel() == 1
