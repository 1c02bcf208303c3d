"""KL estimators and corrections against their definitions, and the gradients that the docs promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vime_grpo.errors import ConfigError
from vime_grpo.kl import KL_CLAMP, KL_KINDS, kl_penalty

log_ratios = st.floats(-5, 5, allow_nan=False)


@given(log_ratios)
def test_values_follow_their_definitions(delta: float) -> None:
    delta_t = torch.tensor([delta], dtype=torch.float64)
    zero_t = torch.zeros_like(delta_t)
    expected = {"k1": delta, "k2": delta**2 / 2, "k3": math.exp(-delta) - 1 + delta}
    expected["low_var_kl"] = max(-KL_CLAMP, min(KL_CLAMP, expected["k3"]))
    assert set(expected) == set(KL_KINDS.names())
    for kind, value in expected.items():
        assert float(kl_penalty(delta_t, zero_t, kind)) == pytest.approx(value, abs=1e-12)


@given(st.floats(-300, 300))
def test_low_var_kl_stays_finite_with_its_gradient(delta: float) -> None:
    logprob_t = torch.tensor([delta], requires_grad=True)
    value = kl_penalty(logprob_t, torch.zeros(1), "low_var_kl").sum()
    value.backward()
    assert abs(value.item()) <= KL_CLAMP
    assert logprob_t.grad is not None
    assert torch.isfinite(logprob_t.grad).all()


def _categorical() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64)
    target = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits.requires_grad_(), target


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_estimate_the_divergence_without_bias(kind: str) -> None:
    logits, target = _categorical()
    logprobs = logits.detach().log_softmax(0)
    expectation = (logprobs.exp() * kl_penalty(logprobs, target, kind)).sum()
    divergence = (logprobs.exp() * (logprobs - target)).sum()
    assert float(expectation) == pytest.approx(float(divergence), abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_gradient_as_a_loss_is_as_documented(kind: str) -> None:
    logits, target = _categorical()
    logprobs = logits.log_softmax(0)
    # Samples come from the policy, and no gradient flows through the sampling: so the probabilities are constants.
    (logprobs.exp().detach() * kl_penalty(logprobs, target, kind)).sum().backward()
    got, logits.grad = logits.grad, None
    logprobs = logits.log_softmax(0)
    if kind == "k1":
        divergence = (logprobs * 0).sum()
    elif kind == "k2":
        divergence = (logprobs.exp() * (logprobs - target)).sum()
    else:
        divergence = (target.exp() * (target - logprobs)).sum()
    divergence.backward()
    torch.testing.assert_close(got, logits.grad)


def test_unknown_names_and_double_registration_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown KL estimator 'k4'; expected: one of k1, k2, k3, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ConfigError, match="registered twice"):
        KL_KINDS.register("k1", paper="none")(lambda log_ratio_t: log_ratio_t)
    assert all(entry.paper for entry in KL_KINDS)
