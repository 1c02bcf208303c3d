"""Steps: exact sums, refused when not finite, the schedule as promised."""

from __future__ import annotations

import math

import pytest
import torch
from vime_megatron import (
    BatchError,
    GradientError,
    MegatronTrainer,
    TrainerConfig,
    TrainerError,
    TrainSequence,
    sft_loss,
)


def weights_of(trainer):
    return {name: param.detach().clone() for name, param in trainer.params.items()}


def test_learning_lowers_the_loss(make_trainer, tiny, batch):
    trainer = make_trainer(tiny)
    losses = [trainer.step(batch, sft_loss).loss for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.state.step == 15


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_packing_does_not_change_the_result(make_trainer, tiny, batch, budget):
    optimizer = {"lr": 0.3, "eps": 1.0}
    whole = make_trainer(tiny, optimizer=optimizer)
    reference, weights = whole.step(batch, sft_loss), weights_of(whole)
    trainer = make_trainer(tiny, max_tokens_per_microbatch=budget, logprob_chunk_tokens=3, optimizer=optimizer)
    found = trainer.step(batch, sft_loss)
    assert found.loss == pytest.approx(reference.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)


def test_tokens_of_weight_zero_are_skipped_and_fields_are_aligned(make_trainer, tiny, batch):
    trainer = make_trainer(tiny)
    seen = []

    def loss(logprobs_t, entropy_t, fields):
        seen.append((logprobs_t.detach().clone(), fields["weight"].clone(), fields["advantage"].clone()))
        return -(fields["weight"] * logprobs_t).sum(), {}

    scores = trainer.logprobs(batch)
    trainer.step(batch, loss)
    logprobs, weight, advantage = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert (weight > 0).all()
    masks = [sequence.fields["weight"] > 0 for sequence in batch]
    wanted = torch.cat([scores[i][mask] for i, mask in enumerate(masks)])
    torch.testing.assert_close(logprobs.sort().values, wanted.sort().values, rtol=1e-5, atol=1e-5)
    values = torch.cat([s.fields["advantage"][mask] for s, mask in zip(batch, masks, strict=True)])
    assert torch.equal(advantage.sort().values, values.sort().values)


def test_a_row_without_trained_tokens_adds_nothing(make_trainer, tiny, batch):
    trainer = make_trainer(tiny, max_tokens_per_microbatch=1)
    batch[0].fields["weight"].zero_()
    metrics = trainer.step(batch, sft_loss)
    assert math.isfinite(metrics.loss)


def test_a_loss_may_answer_no_tokens_with_a_number_of_its_own(make_trainer, tiny, batch):
    def loss(logprobs_t, entropy_t, fields):
        return sft_loss(logprobs_t, entropy_t, fields) if logprobs_t.numel() else (torch.zeros(()), {})

    batch[0].fields["weight"].zero_()
    wanted, found = (make_trainer(tiny, max_tokens_per_microbatch=1).step(batch, each) for each in (sft_loss, loss))
    assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)


@pytest.mark.parametrize("budget", [1, 1000])
def test_sequences_of_one_token_predict_nothing(make_trainer, tiny, batch, batch_of, budget):
    names = batch[0].fields
    single = TrainSequence(torch.tensor([7]), {name: torch.zeros(1) for name in names})
    trainer = make_trainer(tiny, max_tokens_per_microbatch=budget)
    wanted, scores = trainer.step(batch, sft_loss), trainer.logprobs(batch)
    trainer = make_trainer(tiny, max_tokens_per_microbatch=budget)
    mixed = [single, *batch, single]
    found, others = trainer.step(mixed, sft_loss), trainer.logprobs(mixed)
    assert (found.loss, found.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    assert found.tokens == wanted.tokens + 2
    assert others[0].tolist() == others[len(batch) + 1].tolist() == [0.0]
    for index, values in scores.items():
        torch.testing.assert_close(others[index + 1], values, rtol=1e-4, atol=1e-4)
    fresh = make_trainer(tiny)
    before = weights_of(fresh)
    nothing = fresh.step([single, single], sft_loss)
    assert (nothing.loss, nothing.grad_norm, nothing.metrics["entropy"]) == (0.0, 0.0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in weights_of(fresh).items())


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(make_trainer, tiny, batch, poison):
    trainer = make_trainer(tiny, optimizer={"lr": 1e-2, "warmup_steps": 5})
    trainer.step(batch, sft_loss)
    before = weights_of(trainer)

    def broken(logprobs_t, entropy_t, fields):
        if poison == "loss":
            return logprobs_t.sum() * float("nan"), {}
        return (logprobs_t - logprobs_t.detach()).abs().sqrt().sum(), {}  # 0, with an infinite slope

    with pytest.raises(GradientError, match=r"linear_qkv|word_embeddings"):
        trainer.step(batch, broken)
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    assert trainer.state.step == 1
    again = trainer.step(batch, sft_loss)
    fresh = make_trainer(tiny, optimizer={"lr": 1e-2, "warmup_steps": 5})
    fresh.step(batch, sft_loss)
    undisturbed = fresh.step(batch, sft_loss)
    assert (again.loss, again.lr, again.grad_norm) == (undisturbed.loss, undisturbed.lr, undisturbed.grad_norm)


def test_the_schedule_warms_up_and_falls(make_trainer, tiny, batch):
    optimizer = {"lr": 1e-3, "min_lr": 1e-4, "schedule": "cosine", "warmup_steps": 2, "decay_steps": 6}
    trainer = make_trainer(tiny, optimizer=optimizer)
    rates = [trainer.step(batch, sft_loss).lr for _ in range(7)]
    middle = [1e-4 + 0.5 * (1 + math.cos(math.pi * k / 4)) * 9e-4 for k in range(1, 4)]
    assert rates == pytest.approx([5e-4, 1e-3, *middle, 1e-4, 1e-4])
    constant = make_trainer(tiny, optimizer={"lr": 1e-3})
    assert [constant.step(batch, sft_loss).lr for _ in range(3)] == pytest.approx([1e-3] * 3)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_weights_decay_but_not_biases_and_norms(make_trainer, model_of, batch, kind):
    trainer = make_trainer(model_of(kind), optimizer={"lr": 0.1, "weight_decay": 0.5})
    before = weights_of(trainer)
    trainer.step(batch, lambda logprobs, entropy, fields: (0.0 * logprobs.sum(), {}))
    for name, value in weights_of(trainer).items():
        kept = 1.0 if value.dim() == 1 else 1 - 0.1 * 0.5
        torch.testing.assert_close(value, kept * before[name], rtol=1e-6, atol=0.0, msg=name)


def test_clipping_scales_the_update_but_not_the_reported_norm(make_trainer, tiny, batch):
    norms = [
        make_trainer(tiny, optimizer={"lr": 1e-2, "clip_grad": c}).step(batch, sft_loss).grad_norm for c in (0, 1e-3)
    ]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-3


def test_bfloat16_trains_with_float32_masters(make_trainer, tiny, batch):
    trainer = make_trainer(tiny, dtype="bfloat16", optimizer={"lr": 5e-5})
    before = trainer.step(batch, sft_loss).loss
    for _ in range(40):
        after = trainer.step(batch, sft_loss).loss
    # the step is far below bf16's resolution of a weight, so only masters can have added it up
    assert after < before - 1e-3


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda logprobs: (logprobs, {}), r"not a scalar.*shape \(\d+,\)"),
        (lambda logprobs: (1.5, {}), "not a scalar; seen: float"),
        (lambda logprobs: (logprobs.sum(), {"loss": logprobs.mean()}), r"'loss'.*names other than 'loss'"),
        (lambda logprobs: (logprobs.sum(), {"kl": 0.5, "all": logprobs}), r"cannot be added up.*'kl', 'all'"),
        (lambda logprobs: (logprobs.detach().sum(), {}), "the loss has no gradient"),
    ],
    ids=["vector", "number", "name", "metrics", "detached"],
)
def test_what_a_loss_must_not_return_is_refused(make_trainer, tiny, batch, answer, text):
    trainer = make_trainer(tiny)
    before = weights_of(trainer)
    with pytest.raises(BatchError, match=text):
        trainer.step(batch, lambda logprobs, entropy, fields: answer(logprobs))
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    assert trainer.step(batch, sft_loss).step == 1


def test_the_limit_on_length_names_the_sequence(make_trainer, tiny, batch):
    with pytest.raises(BatchError, match=r"sequence 4 of 6.*30 tokens.*at most 20"):
        make_trainer(tiny, max_sequence_length=20).step(batch, sft_loss)


def test_one_trainer_a_process(make_trainer, tiny):
    make_trainer(tiny)
    with pytest.raises(TrainerError, match="already has process groups"):
        MegatronTrainer(TrainerConfig(model=tiny))


def test_sizes_must_fit_the_world(tiny):
    with pytest.raises(TrainerError, match=r"tensor x pipeline x context = 2"):
        MegatronTrainer(TrainerConfig(model=tiny, tensor_parallel=2))
    with pytest.raises(TrainerError, match="no rendezvous"):
        MegatronTrainer(TrainerConfig(model=tiny), world_size=2)
    with pytest.raises(TrainerError, match="bad rank"):
        MegatronTrainer(TrainerConfig(model=tiny), rank=1)
