"""The update in one pass is torch's AdamW to rounding and Megatron's on every rank; a refused step leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vime_megatron import GradientError, sft_loss
from vime_megatron.kernels import plain

STEPS = 24
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, "warmup_steps": 2}


def test_the_definition_is_torch_s_adamw():
    """Weight decay, a rate and a clipping factor that change, moments from nothing."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draw) for shape in ((7, 33), (5,))]
    halves = [weights[0].bfloat16(), None]
    wanted = [weight.clone().requires_grad_() for weight in weights]
    torch_s = torch.optim.AdamW(wanted, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    for update in range(1, STEPS + 1):
        lr, factor = 1e-2 / update, min(1.0, 5.0 / update)
        grads = [torch.randn(weight.shape, generator=draw) for weight in weights]
        corrections = torch.tensor([[1 - 0.9**update, (1 - 0.95**update) ** 0.5]] * 2)
        parts = zip(weights, grads, moments, halves, strict=True)
        states = [plain.AdamWState(weight, grad, *pair, half) for weight, grad, pair, half in parts]
        plain.adamw(states, corrections, plain.AdamWTerms(lr, 0.9, 0.95, 1e-8, 0.1, factor))
        torch_s.param_groups[0]["lr"] = lr
        for param, grad in zip(wanted, grads, strict=True):
            param.grad = grad * factor
        torch_s.step()
        for state, param in zip(states, wanted, strict=True):
            kept = torch_s.state[param]
            torch.testing.assert_close(state.master, param.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state.mean, kept["exp_avg"], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(state.square, kept["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        assert torch.equal(halves[0], weights[0].bfloat16())


@pytest.mark.parametrize(
    ("kind", "world", "settings"),
    [
        ("qwen3-tied", 1, {}),
        ("qwen3-moe", 2, {"expert_parallel": 2}),
        ("qwen2", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    ],
    ids=["one", "experts", "tensor"],
)
def test_it_is_megatron_s_on_every_rank(ranks, model_of, kind, world, settings):
    """The same gradients, twenty-four times: masters, moments, counts and bfloat16 weights."""
    arguments = {"model": str(model_of(kind)), "settings": settings, "optimizer": SETTINGS, "steps": STEPS}
    for found, wanted in ranks("updates", world, **arguments):
        assert found["clipped"] == wanted["clipped"]
        assert 0 < sum(wanted["clipped"]) < STEPS
        assert (found["own"], wanted["own"]) == (True, False)
        assert found["state"].keys() == wanted["state"].keys()
        for name, tensors in wanted["state"].items():
            assert tensors.keys() == found["state"][name].keys(), name
            for kept, tensor in tensors.items():
                rtol = 2**-7 if tensor.dtype is torch.bfloat16 else 1e-5  # a rounding may fall the other way
                torch.testing.assert_close(
                    found["state"][name][kept], tensor, rtol=rtol, atol=1e-7, msg=f"{name} {kept}"
                )


def one_pass(trainer):
    """Let the definition of the kernel update, which on a GPU Triton's does."""
    trainer._kernels = replace(trainer._kernels, adamw=plain.adamw)
    return trainer


def state_of(trainer):
    """Weights, masters, moments and counts, as copies; moments that are not there yet are zeros."""
    kept = {name: param.detach().clone() for name, param in trainer.params.items()}
    for part in trainer.optimizer.chained_optimizers:
        masters = [master for group in part.optimizer.param_groups for master in group["params"]]
        for number, master in enumerate(masters):
            state = part.optimizer.state.get(master, {})
            kept[f"{number}.master"] = master.detach().clone()
            for name in ("exp_avg", "exp_avg_sq"):
                kept[f"{number}.{name}"] = state[name].clone() if name in state else torch.zeros_like(master)
            kept[f"{number}.step"] = torch.tensor(float(state.get("step", 0.0)))
    return kept


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_run_continues_bit_for_bit_from_its_middle(make_trainer, tiny_tied, batch, tmp_path):
    def fresh():
        return one_pass(make_trainer(tiny_tied, dtype="bfloat16", optimizer=SETTINGS))

    trainer = fresh()
    for _ in range(10):
        trainer.step(batch, sft_loss)
    trainer.save(tmp_path / "saved")
    wanted = [(m.loss, m.grad_norm, m.lr) for m in (trainer.step(batch, sft_loss) for _ in range(10))]
    weights = state_of(trainer)
    again = fresh()
    again.load(tmp_path / "saved")
    assert [(m.loss, m.grad_norm, m.lr) for m in (again.step(batch, sft_loss) for _ in range(10))] == wanted
    assert_same(state_of(again), weights)


@pytest.mark.parametrize("before", [0, 2], ids=["first", "third"])
def test_a_refused_step_leaves_no_trace(make_trainer, tiny_tied, batch, tmp_path, before):
    """The update is prepared before it is known whether the gradients are finite."""

    def broken(logprobs_t, entropy_t, fields):
        return logprobs_t.sum() * float("inf"), {}

    def run(*, refused):
        trainer = one_pass(make_trainer(tiny_tied, dtype="bfloat16", optimizer=SETTINGS))
        for _ in range(before):
            trainer.step(batch, sft_loss)
        kept = state_of(trainer)
        for _ in range(refused):
            with pytest.raises(GradientError):
                trainer.step(batch, broken)
        assert_same(state_of(trainer), kept)
        trainer.save(tmp_path / "saved")
        trainer.load(tmp_path / "saved")
        steps = [trainer.step(batch, sft_loss) for _ in range(2)]
        return [(m.step, m.loss, m.grad_norm, m.lr) for m in steps], state_of(trainer)

    disturbed, undisturbed = run(refused=2), run(refused=0)
    assert disturbed[0] == undisturbed[0]
    assert_same(disturbed[1], undisturbed[1])
