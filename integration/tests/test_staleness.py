"""The age of tokens: what may be trained on, what is masked, and a difference that only on-policy tokens count in."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from vime_grpo import BatchRow, BatchRows, PolicyLoss
from vime_grpo.config import RunConfig, config_from_dict
from vime_integration.batches import RolloutBatch, make_batch
from vime_integration.errors import PipelineError
from vime_integration.staleness import (
    ON_POLICY_DIFFERENCE,
    WithOnPolicyDifference,
    check_lag,
    lag_metrics,
    on_policy_field,
    settle_on_policy,
)
from vime_rollout import Sample, SampleStatus, VersionSpan


def sample(*spans: tuple[int, int, int], reward: float | None = 1.0) -> Sample:
    length = spans[-1][2] if spans else 0
    return Sample(
        prompt_id="p",
        group_id="p@0",
        index=0,
        tokens=tuple(range(2 + length)),
        prompt_length=2,
        loss_mask=(1,) * length,
        logprobs=(-0.5,) * length,
        versions=tuple(VersionSpan(*span) for span in spans),
        status=SampleStatus.COMPLETED,
        response="",
        reward=reward,
    )


MIXED = sample((3, 0, 2), (4, 2, 5))


def test_a_token_older_than_allowed_is_refused_by_name():
    check_lag([MIXED], 4, 1)
    with pytest.raises(PipelineError, match=r"sample 0 of group p@0.*versions \[3, 4\].*version 4 for every token"):
        check_lag([MIXED], 4, 0)
    with pytest.raises(PipelineError, match="version 2 to 3"):
        check_lag([MIXED], 3, 1)
    with pytest.raises(PipelineError, match="not scored"):
        check_lag([sample((4, 0, 1), reward=None)], 4, 1)


def test_lag_metrics_count_samples_and_tokens():
    metrics = lag_metrics([MIXED, sample((4, 0, 5))], 4)
    assert metrics["rollout/lag/mean"] == 0.5
    assert metrics["rollout/lag/max"] == 1
    assert metrics["rollout/lag/off_policy_token_ratio"] == 0.2
    assert metrics["rollout/lag/mixed_samples"] == 1
    assert (metrics["rollout/lag/samples_0"], metrics["rollout/lag/samples_1"]) == (1, 1)


def test_the_difference_counts_on_policy_tokens_only_and_the_loss_is_as_it_was():
    fields = {
        "weight": torch.tensor([0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.0]),
        "advantage": torch.ones(7),
        "rollout_logprob": torch.tensor([0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0]),
        "on_policy": on_policy_field(MIXED, 4),
    }
    logprobs = torch.tensor([0.0, 0.0, -3.0, -3.0, -1.1, -1.3, -9.0])
    plain = PolicyLoss(old="current")
    loss, sums = WithOnPolicyDifference(plain)(logprobs, torch.zeros(7), fields)
    assert torch.equal(loss, plain(logprobs, torch.zeros(7), fields)[0])
    metrics = settle_on_policy({f"train/{name}": float(value / sums["weight_sum"]) for name, value in sums.items()})
    assert metrics[ON_POLICY_DIFFERENCE] == pytest.approx(0.2)
    assert not any("on_policy" in name for name in metrics if name != ON_POLICY_DIFFERENCE)


def test_without_on_policy_tokens_there_is_no_difference_to_report():
    assert ON_POLICY_DIFFERENCE not in settle_on_policy({"train/on_policy_weight_sum": 0.0})


@pytest.mark.parametrize("mask", [False, True])
def test_a_batch_says_which_tokens_are_on_policy_and_masks_the_others_when_asked(mask):
    config = config_of(mask)
    other = dataclasses.replace(sample((4, 0, 5)), index=1, reward=0.0, reward_reason="wrong")
    batch = make_batch([MIXED, other], config, 4, max_lag=1)
    ((mixed, fresh),) = batch.updates
    assert mixed.fields["on_policy"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert fresh.fields["on_policy"].tolist() == [0, 0, 1, 1, 1, 1, 1]
    share = 0.5 / 5  # one of two samples, one of five tokens: the denominators stay those of the batch
    assert fresh.fields["weight"].tolist() == pytest.approx([0, 0] + [share] * 5)
    old = 0.0 if mask else share
    assert mixed.fields["weight"].tolist() == pytest.approx([0, 0, old, old, share, share, share])


def config_of(mask: bool) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": "/models/any"},
            "data": {"kind": "reasoning_gym", "task": "chain_sum", "size": 8},
            "rollout": {
                "batch_size": 1,
                "samples_per_prompt": 2,
                "max_response_tokens": 8,
                "max_context_tokens": 64,
                "mask_off_policy": mask,
            },
            "engine": {},
            "reward": {"name": "reasoning_gym"},
            "algorithm": {},
            "trainer": {},
            "sync": {},
            "pipeline": {"steps": 1, "run_dir": "/runs/any", "mode": "async"},
            "checkpoint": {},
            "tracking": {},
        }
    )


def test_a_batch_travels_packed_and_arrives_as_it_was() -> None:
    rows = tuple(
        BatchRow(torch.arange(length), {"weight": torch.rand(length), "advantage": torch.rand(length)})
        for length in (3, 1, 7)
    )
    batch = RolloutBatch(4, (BatchRows.of(rows), BatchRows.of([]), BatchRows.of(rows[:1])))
    arrived = pickle.loads(pickle.dumps(batch))
    assert arrived.version == 4
    assert [len(update) for update in arrived.updates] == [3, 0, 1]
    for sent, got in zip((*rows, rows[0]), (row for update in arrived.updates for row in update), strict=True):
        assert torch.equal(got.tokens, sent.tokens)
        assert got.fields.keys() == sent.fields.keys()
        assert all(torch.equal(got.fields[name], values) for name, values in sent.fields.items())
    arrived.updates[0][0].fields["weight"].zero_()  # it is the receiver's own, to be written to
