"""The objective by hand: clipping on either side, dual clip, KL, entropy, corrections, masks."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from vime_grpo.config import AlgorithmSection
from vime_grpo.errors import BatchError, ConfigError
from vime_grpo.losses import POLICY_LOSSES, ClipBounds, PolicyLoss


def fields(advantage: list[float], ratio: list[float], weight: list[float] | None = None, **more: list[float]) -> dict:
    """Fields of tokens whose present logprob is -1 and whose ratio is as given."""
    old = [-1 - math.log(r) for r in ratio]
    values = {"advantage": advantage, "old_logprob": old, "rollout_logprob": old, **more}
    values["weight"] = weight or [1.0] * len(advantage)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def run(loss: PolicyLoss, columns: dict[str, torch.Tensor]) -> tuple[float, list[float], dict[str, float]]:
    count = columns["weight"].numel()
    logprobs_t = torch.full((count,), -1.0, dtype=torch.float64, requires_grad=True)
    value, sums = loss(logprobs_t, torch.full((count,), 0.5, dtype=torch.float64), columns)
    value.backward()
    assert logprobs_t.grad is not None
    return value.item(), logprobs_t.grad.tolist(), {name: item.item() for name, item in sums.items()}


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "gradient", "clipped"),
    [
        (2.0, 1.0, -2.0, -2.0, 0),
        (2.0, 1.2, -2.4, -2.4, 0),
        (2.0, 1.5, -2.56, 0.0, 1),  # above 1 + 0.28: no more push up
        (2.0, 0.5, -1.0, -1.0, 0),  # below, but the push is back up
        (-2.0, 0.5, 1.6, 0.0, 1),  # below 1 - 0.2: no more push down
        (-2.0, 1.5, 3.0, 3.0, 0),  # above, and the push is back down
        (0.0, 3.0, 0.0, 0.0, 0),
    ],
)
def test_clip_has_two_separate_bounds(
    advantage: float, ratio: float, value: float, gradient: float, clipped: int
) -> None:
    loss = PolicyLoss(bounds=ClipBounds(0.2, 0.28))
    got, grad, sums = run(loss, fields([advantage], [ratio]))
    assert got == pytest.approx(value)
    assert grad == pytest.approx([gradient])
    assert sums["pg_clipfrac"] == clipped
    assert sums["pg_loss"] == pytest.approx(value)
    assert sums["ppo_kl"] == pytest.approx(-math.log(ratio))
    assert sums["entropy_loss"] == pytest.approx(0.5)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    loss = PolicyLoss(bounds=ClipBounds(0.2, 0.2, 3.0))
    value, grad, sums = run(loss, fields([-1.0, 1.0, -1.0], [10.0, 0.1, 2.0]))
    assert value == pytest.approx(3.0 - 0.1 + 2.0)
    assert grad == pytest.approx([0.0, -0.1, 2.0])
    assert sums["pg_clipfrac"] == 1  # the token without a gradient, and no other


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    loss = PolicyLoss(objective="cispo", bounds=ClipBounds(0.2, 0.28))
    value, grad, sums = run(loss, fields([2.0, 2.0], [1.5, 1.0]))
    assert grad == pytest.approx([-2.56, -2.0])
    assert value == pytest.approx(2.56 + 2.0)  # times -logprob, which is 1
    assert sums["pg_clipfrac"] == 1


def test_first_update_equals_the_policy_gradient() -> None:
    columns = fields([1.5, -0.5], [1.0, 1.0], weight=[0.25, 0.75])
    for objective in POLICY_LOSSES.names():
        _, grad, _ = run(PolicyLoss(objective=objective), columns)
        assert grad == pytest.approx([-1.5 * 0.25, 0.5 * 0.75])


def test_kl_penalty_pulls_towards_its_target() -> None:
    columns = fields([0.0, 0.0], [1.0, 1.0], ref_logprob=[-1.5, -0.5])
    value, grad, sums = run(PolicyLoss(kl_coef=0.1, kl_kind="k2"), columns)
    assert sums["kl_loss"] == pytest.approx(0.25)
    assert value == pytest.approx(0.025)
    assert grad == pytest.approx([0.05, -0.05])
    value, grad, _ = run(PolicyLoss(kl_coef=0.1, kl_kind="k2", kl_target="behaviour"), fields([0.0], [math.e]))
    assert (value, grad) == (pytest.approx(0.05), pytest.approx([0.1]))


def test_entropy_bonus_lowers_the_loss() -> None:
    assert run(PolicyLoss(entropy_coef=0.1), fields([0.0], [1.0]))[0] == pytest.approx(-0.05)


def test_the_denominator_is_what_was_asked_for() -> None:
    columns = fields([1.0], [1.0])
    columns["old_logprob"] = torch.tensor([-1.1], dtype=torch.float64)
    columns["rollout_logprob"] = torch.tensor([-1.2], dtype=torch.float64)
    expected = {"recompute": (math.exp(0.1), 0.1), "rollout": (math.exp(0.2), 0.2), "current": (1.0, 0.2)}
    for old, (ratio, difference) in expected.items():
        value, grad, sums = run(PolicyLoss(old=old, bounds=ClipBounds(0.9, 0.9)), columns)
        assert value == pytest.approx(-ratio)
        assert grad == pytest.approx([-ratio])
        assert sums["train_rollout_logprob_abs_diff"] == pytest.approx(difference)


def test_corrections_scale_the_gradient_and_report_themselves() -> None:
    columns = fields([1.0, 1.0], [1.0, 1.0])
    columns["rollout_logprob"] = torch.tensor([-1.0, -1 - math.log(4)], dtype=torch.float64)
    _, grad, sums = run(PolicyLoss(correction="tis", correction_high=2.0), columns)
    assert grad == pytest.approx([-1.0, -2.0])
    assert sums["tis"] == pytest.approx(5.0)
    assert sums["tis_clipfrac"] == 1
    assert sums["tis_abs"] == pytest.approx(3.0)
    _, grad, _ = run(PolicyLoss(correction="icepop", correction_low=0.5), columns)
    assert grad == pytest.approx([-1.0, 0.0])


def test_masked_tokens_count_nowhere_even_as_nan() -> None:
    nan = float("nan")
    columns = fields([1.0, nan], [1.2, 1.0], weight=[0.5, 0.0])
    for name in ("old_logprob", "rollout_logprob"):
        columns[name][1] = nan
    logprobs_t = torch.tensor([-1.0, nan], dtype=torch.float64, requires_grad=True)
    loss = PolicyLoss(kl_coef=0.1, kl_target="behaviour", entropy_coef=0.1, correction="tis")
    value, sums = loss(logprobs_t, torch.tensor([0.5, nan], dtype=torch.float64), columns)
    value.backward()
    assert math.isfinite(value.item())
    assert all(math.isfinite(item.item()) for item in sums.values())
    assert logprobs_t.grad is not None
    assert logprobs_t.grad[1] == 0
    assert sums["weight_sum"] == 0.5


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprob", [0.0, -1e4])
def test_absurd_ratios_give_finite_gradients(advantage: float, logprob: float) -> None:
    columns = {name: torch.tensor([-5e3]) for name in ("old_logprob", "rollout_logprob")}
    columns |= {"advantage": torch.tensor([advantage]), "weight": torch.ones(1)}
    logprobs_t = torch.tensor([logprob], requires_grad=True)
    value, _ = PolicyLoss()(logprobs_t, torch.zeros(1), columns)
    value.backward()
    assert logprobs_t.grad is not None
    assert torch.isfinite(logprobs_t.grad).all()


@pytest.mark.parametrize(
    "loss", [PolicyLoss(), PolicyLoss(ratio_level="sequence", correction="icepop", correction_level="sequence")]
)
def test_empty_micro_batch_is_zero_and_differentiable(loss: PolicyLoss) -> None:
    logprobs_t = torch.zeros(0, requires_grad=True)
    columns = dict.fromkeys(("weight", "advantage", "old_logprob", "rollout_logprob", "sequence"), torch.zeros(0))
    value, sums = loss(logprobs_t, torch.zeros(0), columns)
    value.backward()
    assert value == 0
    assert all(item == 0 for item in sums.values())


def test_from_config_reads_every_knob() -> None:
    section = AlgorithmSection(
        policy_loss="clip", clip_low=0.1, clip_high=0.3, clip_dual=3.0, kl_coef=0.01, kl_kind="k3",
        kl_target="behaviour", entropy_coef=0.02, correction="icepop", correction_low=0.5, correction_high=5.0,
        correction_level="geometric", ratio_level="sequence",
    )  # fmt: skip
    loss = PolicyLoss.from_config(section)
    assert loss.bounds == ClipBounds(0.1, 0.3, 3.0)
    assert (loss.kl_coef, loss.kl_kind, loss.kl_target) == (0.01, "k3", "behaviour")
    assert (loss.entropy_coef, loss.old) == (0.02, "recompute")
    assert (loss.correction, loss.correction_low, loss.correction_high) == ("icepop", 0.5, 5.0)
    assert (loss.correction_level, loss.ratio_level) == ("geometric", "sequence")
    assert PolicyLoss.from_config(section, reuse_current=True).old == "current"
    on_rollout = AlgorithmSection(old_logprobs="rollout")
    assert PolicyLoss.from_config(on_rollout, reuse_current=True).old == "rollout"
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_missing_fields_and_wrong_names_are_named() -> None:
    columns = fields([1.0], [1.0])
    del columns["old_logprob"]
    with pytest.raises(BatchError, match=r"lacks the field 'old_logprob'.*seen: advantage, rollout_logprob, weight"):
        run(PolicyLoss(), columns)
    with pytest.raises(ConfigError, match=r"unknown policy loss 'ppo'"):
        PolicyLoss(objective="ppo")
    with pytest.raises(ConfigError, match=r"unknown level of a ratio 'turn'; expected: one of token, sequence, geom"):
        PolicyLoss(correction_level="turn")
    with pytest.raises(ConfigError, match=r"unknown level of a ratio 'geometric'; expected: one of token, sequence$"):
        PolicyLoss(ratio_level="geometric")
    with pytest.raises(ConfigError, match=r"unknown denominator of the ratio 'rollouts'.*did you mean 'rollout'"):
        PolicyLoss(old="rollouts")
    with pytest.raises(ConfigError, match=r"unknown target of the KL penalty 'behavior'.*did you mean 'behaviour'"):
        PolicyLoss(kl_target="behavior")
    with pytest.raises(BatchError, match=r"lacks the field 'sequence'"):
        run(PolicyLoss(correction="mis", correction_level="sequence"), fields([1.0], [1.0]))


def test_corrections_that_cannot_do_what_they_say_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"correction 'tis' with old \"rollout\", where there is no ratio left"):
        PolicyLoss(correction="tis", old="rollout")
    for bounds in ((0.0, 0.5), (1.5, 2.0), (0.0, math.nan)):
        with pytest.raises(ConfigError, match=r"on policy as they are.*expected: 1, the ratio on policy, between them"):
            PolicyLoss(correction="mis", correction_low=bounds[0], correction_high=bounds[1])
