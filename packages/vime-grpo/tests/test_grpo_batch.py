"""The invariant of the package: however a batch is cut, the loss, its gradient and its metrics are the same."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_grpo.advantages import group_advantages
from vime_grpo.batch import AGGREGATIONS, BatchRow, BatchRows, TrainSample, build_batch, split_updates, token_weights
from vime_grpo.correction import CORRECTIONS, LEVELS
from vime_grpo.errors import BatchError, ConfigError
from vime_grpo.losses import POLICY_LOSSES, PolicyLoss

VOCABULARY = 7


def sample(group: str = "g", prompt: int = 2, response: int = 3, reward: float = 1.0, **changes: object) -> TrainSample:
    tokens = tuple((i * 3 + response) % VOCABULARY for i in range(prompt + response))
    base = TrainSample(group, tokens, prompt, (1,) * response, (-0.5,) * response, reward)
    return dataclasses.replace(base, **changes)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    samples = []
    for _ in range(draw(st.integers(1, 7))):
        response = draw(st.integers(0, 6))
        mask = tuple(draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)))
        logprobs = tuple(draw(st.lists(st.floats(-4, 0), min_size=response, max_size=response)))
        prompt, group = draw(st.integers(1, 4)), draw(st.sampled_from("abc"))
        reward = draw(st.floats(-2, 2))
        samples.append(sample(group, prompt, response, reward, loss_mask=mask, logprobs=logprobs))
    if not any(any(item.loss_mask) for item in samples):
        samples.append(sample())
    return samples


def evaluate(
    micro_batches: list[list[BatchRow]], loss: PolicyLoss
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Run a bigram model over packed micro-batches as a trainer does: add everything."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table.requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), {}
    for rows in micro_batches:
        if not rows:
            continue
        previous_t = torch.cat([row.tokens[:-1] for row in rows])
        target_t = torch.cat([row.tokens[1:] for row in rows])
        columns = {name: torch.cat([row.fields[name][1:] for row in rows]) for name in rows[0].fields}
        log_probs_tv = table[previous_t].log_softmax(-1)
        logprobs_t = log_probs_tv.gather(-1, target_t[:, None]).squeeze(-1)
        entropy_t = -(log_probs_tv.exp() * log_probs_tv).sum(-1)
        value, parts = loss(logprobs_t, entropy_t, columns)
        value.backward()
        total = total + value.detach()
        sums = {name: sums.get(name, 0) + part for name, part in parts.items()}
    assert table.grad is not None
    return total, table.grad, sums


@settings(max_examples=60)
@given(
    sample_lists(),
    st.sampled_from(AGGREGATIONS.names()),
    st.sampled_from(POLICY_LOSSES.names()),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(CORRECTIONS.names()),
    st.sampled_from(LEVELS),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_the_same_loss_and_gradient(
    samples: list[TrainSample],
    aggregation: str,
    objective: str,
    ratio_level: str,
    correction: str,
    level: str,
    parts: int,
    rng: random.Random,
) -> None:
    advantages = group_advantages([s.reward for s in samples], [s.group_id for s in samples])
    noise = [torch.tensor([-rng.random() for _ in s.tokens]) for s in samples]
    rows = build_batch(samples, advantages, aggregation=aggregation, horizon=6, old_logprobs=noise, ref_logprobs=noise)
    loss = PolicyLoss(
        objective=objective,
        kl_coef=0.1,
        entropy_coef=0.01,
        ratio_level=ratio_level,
        correction=correction,
        correction_level=level,
        correction_low=0.4 if correction in ("tis", "icepop") else 0.0,
    )
    whole = evaluate([rows], loss)

    order = list(rows)
    rng.shuffle(order)
    split: list[list[BatchRow]] = [[] for _ in range(parts)]
    for row in order:
        split[rng.randrange(parts)].append(row)
    cut = evaluate(split, loss)

    torch.testing.assert_close(cut[0], whole[0])
    torch.testing.assert_close(cut[1], whole[1])
    for name in whole[2]:
        torch.testing.assert_close(cut[2][name], whole[2][name])


@given(sample_lists())
def test_weights_of_the_means_add_up_to_one(samples: list[TrainSample]) -> None:
    zeros = [0.0] * len(samples)
    for aggregation in ("sample_mean", "token_mean"):
        rows = build_batch(samples, zeros, aggregation=aggregation)
        assert float(sum(row.fields["weight"].sum() for row in rows)) == pytest.approx(1, rel=1e-5)


def test_sample_mean_is_a_mean_of_means() -> None:
    samples = [sample(response=1), sample(response=4), sample(response=0)]
    rows = build_batch(samples, [1.0, 2.0, 3.0])
    assert rows[0].fields["weight"].tolist() == [0, 0, 0.5]
    assert rows[1].fields["weight"].tolist() == [0, 0, 0.125, 0.125, 0.125, 0.125]
    assert rows[2].fields["weight"].tolist() == [0, 0]  # trains nothing, so it is no part of the mean either


def test_token_mean_and_horizon_by_hand() -> None:
    assert token_weights([1, 3], "token_mean").tolist() == [0.25, 0.25]
    assert token_weights([1, 3, 0], "horizon", 5).tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_values_stand_at_the_token_they_predict() -> None:
    item = sample(prompt=2, response=3, loss_mask=(1, 0, 1), logprobs=(-0.1, -0.2, -0.3))
    (row,) = build_batch([item], [2.0], old_logprobs={0: torch.arange(5.0)})
    assert row.tokens.tolist() == list(item.tokens)
    assert row.tokens.dtype == torch.int64
    assert row.fields["weight"].tolist() == [0, 0, 0.5, 0, 0.5]
    assert row.fields["advantage"].tolist() == [0, 0, 2, 0, 2]
    assert row.fields["rollout_logprob"].tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert row.fields["old_logprob"].tolist() == [0, 1, 2, 3, 4]
    assert row.fields["sequence"].tolist() == [1, 1, 1, 1, 1]
    assert "ref_logprob" not in row.fields


@given(sample_lists(), st.sampled_from(AGGREGATIONS.names()), st.randoms(use_true_random=False))
def test_leaving_old_tokens_out_does_not_make_the_others_count_more(
    samples: list[TrainSample], aggregation: str, rng: random.Random
) -> None:
    zeros = [0.0] * len(samples)
    keep = [[rng.randrange(2) for _ in item.loss_mask] for item in samples]
    whole = build_batch(samples, zeros, aggregation=aggregation, horizon=6)
    rest = [
        a and b for item, kept in zip(samples, keep, strict=True) for a, b in zip(kept, item.loss_mask, strict=True)
    ]
    if not any(rest):
        with pytest.raises(BatchError, match=r"nothing to train on.*every trained token is off policy"):
            build_batch(samples, zeros, aggregation=aggregation, horizon=6, on_policy=keep)
        return
    masked = build_batch(samples, zeros, aggregation=aggregation, horizon=6, on_policy=keep)
    for item, kept, before, after in zip(samples, keep, whole, masked, strict=True):
        kept_s = torch.tensor([0] * item.prompt_length + kept)
        assert torch.equal(after.fields["weight"], before.fields["weight"] * kept_s)
        assert torch.equal(after.fields["advantage"], before.fields["advantage"])


def test_wrong_masks_of_old_tokens_are_named() -> None:
    item = sample()
    for mask, text in (([[1, 1]], "2 values.*expected: 3"), ([], "0 samples"), ([[1, 2, 1]], "other values")):
        with pytest.raises(BatchError, match=f"on_policy.*{text}"):
            build_batch([item], [1.0], on_policy=mask)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (sample(loss_mask=(1, 1)), "loss_mask does not match.*sample 0, group 'g'.*2 values.*3, one per"),
        (sample(logprobs=(-1.0,)), "logprobs does not match"),
        (sample(loss_mask=(1, 2, 0)), "other values than 0 and 1"),
        (sample(logprobs=(-1.0, float("nan"), -1.0)), "engine's logprob is not finite"),
        (sample(prompt_length=0), "bad prompt length"),
        (sample(prompt_length=9), "bad prompt length.*prompt_length 9, 5 tokens"),
        (sample(loss_mask=(0, 0, 0)), "nothing to train on"),
    ],
)
def test_bad_samples_are_named(item: TrainSample, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        build_batch([item], [1.0])


def test_bad_batches_are_named() -> None:
    item = sample()
    with pytest.raises(BatchError, match="bad advantages"):
        build_batch([item], [1.0, 2.0])
    with pytest.raises(BatchError, match="bad advantages"):
        build_batch([item], [float("inf")])
    with pytest.raises(BatchError, match="needs a horizon"):
        build_batch([item], [1.0], aggregation="horizon")
    with pytest.raises(BatchError, match=r"logprobs are missing.*old_logprob of sample 0"):
        build_batch([item], [1.0], old_logprobs={})
    with pytest.raises(BatchError, match=r"do not match the tokens.*ref_logprob"):
        build_batch([item], [1.0], ref_logprobs=[torch.zeros(3)])
    with pytest.raises(BatchError, match="a logprob is not finite"):
        build_batch([item], [1.0], old_logprobs=[torch.full((5,), float("nan"))])
    with pytest.raises(ConfigError, match="unknown loss aggregation"):
        build_batch([item], [1.0], aggregation="mean")


def test_nan_is_allowed_where_nothing_is_trained() -> None:
    values = torch.tensor([float("nan"), float("nan"), -1.0, float("nan"), -1.0])
    (row,) = build_batch([sample(loss_mask=(1, 0, 1))], [1.0], old_logprobs=[values])
    trained = row.fields["weight"] != 0
    assert trained.tolist() == [False, False, True, False, True]
    assert row.fields["old_logprob"][trained].tolist() == [-1.0, -1.0]


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.integers(1, 6))
def test_updates_share_whole_groups(ids: list[str], updates: int) -> None:
    groups = list(dict.fromkeys(ids))
    if updates > len(groups):
        with pytest.raises(BatchError, match="not enough groups"):
            split_updates(ids, updates)
        return
    parts = split_updates(ids, updates)
    assert sorted(position for part in parts for position in part) == list(range(len(ids)))
    owners = [{ids[position] for position in part} for part in parts]
    assert sum(len(owner) for owner in owners) == len(groups)
    sizes = [len(owner) for owner in owners]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 5), max_size=6))
def test_rows_laid_end_to_end_are_the_rows(lengths: list[int]) -> None:
    rows = [BatchRow(torch.arange(n) + 7 * i, {"weight": torch.rand(n)}) for i, n in enumerate(lengths)]
    laid = BatchRows.of(rows)
    more = laid.with_fields(double=[2 * row.fields["weight"] for row in rows]) if rows else laid
    assert len(laid) == len(rows) == len(BatchRows.of(laid))
    for found in (
        list(more),
        [more[i] for i in range(len(rows))],
        more[:],
        [more[i - len(rows)] for i in range(len(rows))],
    ):
        assert len(found) == len(rows)
        for got, put in zip(found, rows, strict=True):
            assert torch.equal(got.tokens, put.tokens)
            assert torch.equal(got.fields["weight"], put.fields["weight"])
            assert torch.equal(got.fields["double"], 2 * put.fields["weight"])
    if rows:
        joined, wanted = BatchRows.join([laid, BatchRows.of(rows[:1]), laid]), [*rows, rows[0], *rows]
        assert [row.tokens.tolist() for row in joined] == [row.tokens.tolist() for row in wanted]
        assert torch.equal(joined.fields["weight"], torch.cat([row.fields["weight"] for row in wanted]))
    with pytest.raises(IndexError):
        laid[len(rows)]
    assert laid.fields.keys() == ({"weight"} if rows else set()), "what has more fields is another"


def test_a_field_that_does_not_fit_the_rows_is_refused() -> None:
    rows = BatchRows([2, 1], torch.arange(3), {})
    with pytest.raises(BatchError, match=r"sequence.*\(2,\).*\(3,\)"):
        rows.with_fields(sequence=[torch.ones(1), torch.ones(1)])
    with pytest.raises(BatchError, match="tokens"):
        BatchRows([2, 2], torch.arange(3), {})
