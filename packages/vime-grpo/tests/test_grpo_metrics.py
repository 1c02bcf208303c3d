"""Metrics by hand, from real losses and batches."""

from __future__ import annotations

import pytest
import torch
from vime_grpo import PolicyLoss, TrainSample, batch_metrics, build_batch, mean_metrics, train_metrics
from vime_grpo.errors import BatchError


def two_samples() -> list[TrainSample]:
    return [
        TrainSample("a", (1, 2, 3), 1, (1, 1), (-0.5, -1.5), 1.0),
        TrainSample("a", (1, 2, 3, 4), 2, (0, 1), (-9.0, -2.0), 0.0),
    ]


def test_batch_metrics_are_means_of_sample_means() -> None:
    old = [torch.tensor([0.0, -0.5, -1.25]), torch.tensor([0.0, 0.0, 7.0, -1.0])]
    rows = build_batch(two_samples(), [2.0, -1.0], old_logprobs=old)
    assert batch_metrics(rows) == {
        "rollout/advantages": 0.5,
        "rollout/rollout_log_probs": (-1.0 + -2.0) / 2,
        "rollout/log_probs": pytest.approx((-0.875 + -1.0) / 2),
        "rollout/logprob_abs_diff_max": 1.0,
    }


def test_rows_of_several_batches_may_differ_in_their_fields() -> None:
    old = [torch.tensor([0.0, -0.5, -1.25]), torch.tensor([0.0, 0.0, 7.0, -1.0])]
    scored = build_batch(two_samples(), [2.0, -1.0], old_logprobs=old)
    plain = build_batch(two_samples(), [4.0, -1.0])
    for rows in ([*scored, *plain], [*plain, *scored]):
        assert batch_metrics(rows) == {
            "rollout/advantages": 1.0,
            "rollout/rollout_log_probs": -1.5,
            "rollout/log_probs": pytest.approx((-0.875 + -1.0) / 2),
            "rollout/logprob_abs_diff_max": 1.0,
        }


def test_samples_that_train_nothing_are_left_out() -> None:
    empty = TrainSample("b", (1, 2), 1, (0,), (-3.0,), 0.0)
    rows = build_batch([*two_samples(), empty], [2.0, -1.0, 5.0])
    assert batch_metrics(rows) == {"rollout/advantages": 0.5, "rollout/rollout_log_probs": -1.5}


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "horizon"])
def test_train_metrics_are_means_whatever_the_loss_is_scaled_by(aggregation: str) -> None:
    rows = build_batch(two_samples(), [2.0, -1.0], aggregation=aggregation, horizon=10)
    columns = {name: torch.cat([row.fields[name] for row in rows]) for name in rows[0].fields}
    logprobs_t = columns["rollout_logprob"] + 0.25
    value, sums = PolicyLoss(old="rollout")(logprobs_t, torch.full_like(logprobs_t, 0.75), columns)
    plain = {name: item.item() for name, item in sums.items()}
    metrics = train_metrics(plain, loss=value.item(), grad_norm=2.0, lr=1e-6)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.25)
    assert metrics["train/entropy_loss"] == pytest.approx(0.75)
    assert metrics["train/ppo_kl"] == pytest.approx(-0.25)
    assert metrics["train/pg_loss"] == metrics["train/loss"] == value.item()
    assert (metrics["train/grad_norm"], metrics["train/lr-pg_0"]) == (2.0, 1e-6)
    assert "train/weight_sum" not in metrics


def test_sums_of_something_else_are_refused() -> None:
    with pytest.raises(BatchError, match="sums without weight"):
        train_metrics({"nll": 1.0}, loss=1.0, grad_norm=1.0, lr=1.0)


def test_several_updates_are_averaged_by_name() -> None:
    assert mean_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}
    assert mean_metrics([]) == {}
