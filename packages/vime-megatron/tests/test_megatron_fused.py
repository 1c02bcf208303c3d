"""The fused kernels under Triton's interpreter, selective recomputation and offload."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from vime_megatron.errors import TrainerError
from vime_megatron.kernels import plain
from vime_megatron.kernels.plain import HeadLayout
from vime_megatron.losses import sft_loss

NAMES = tuple(f"vime_megatron.kernels.{name}" for name in ("layer", "vocab", "norm", "adamw"))


def _pure(name: str) -> bool:
    return name in NAMES or ((name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C"))


@pytest.fixture(scope="module")
def fused():
    """The kernel modules, read while Triton interprets; Triton decides that when it is imported itself."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _pure(name)}
    yield [importlib.import_module(name) for name in NAMES]
    for name in [name for name in sys.modules if _pure(name)]:
        del sys.modules[name]
    sys.modules.update(kept)
    patch.undo()


def both(function, reference, inputs, rest=()):
    """Outputs and input gradients of two implementations, for the same outgoing gradients."""
    results = []
    for implementation in (function, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = implementation(*leaves, *rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        draw = torch.Generator().manual_seed(1)
        grads = [torch.randn(out.shape, generator=draw) for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("width", [3, 1025])
def test_gated_silu(fused, width):
    for got, wanted in both(fused[0].gated_silu, plain.gated_silu, [torch.randn(3, 2 * width)]):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adds", [False, True])
def test_sum_and_norm(fused, adds, monkeypatch):
    monkeypatch.setattr(fused[2], "_PROGRAMS", 3)  # more rows than programs
    weight, inputs = torch.rand(48) + 0.5, [torch.randn(7, 1, 48) for _ in range(1 + adds)]

    def run(module):
        return lambda weight, x, added=None: module.add_norm(x, added, weight, 1e-6)

    for got, wanted in both(run(fused[2]), run(plain), [weight, *inputs]):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_norm_is_recomputed_bit_for_bit(fused):
    x, added, weight = (torch.randn(5, 40).half() for _ in range(3))  # the interpreter truncates to bfloat16
    normed, total = fused[2].add_norm(x, added, weight[0], 1e-6)
    assert torch.equal(total, x + added)
    assert torch.equal(normed, fused[2].norm(total, weight[0], 1e-6))


@pytest.mark.parametrize("width", [8, 12])  # 12: a half that is no power of two
def test_query_key_value(fused, width):
    layout, tokens = HeadLayout(heads=4, groups=2, width=width, eps=1e-6), 37  # more than one block, a part of one
    angles = torch.randn(tokens, width // 2)
    inputs = [torch.randn(tokens, 8 * width), torch.rand(width) + 0.5, torch.rand(width) + 0.5]
    for got, wanted in both(
        fused[0].query_key_value, plain.query_key_value, inputs, (angles.cos(), angles.sin(), layout)
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_update(fused):
    draw = torch.Generator().manual_seed(2)
    terms = plain.AdamWTerms(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1, factor=0.5)
    corrections = torch.tensor([[0.1, 0.001**0.5], [0.19, 0.001999**0.5]])
    results = []
    for module in (fused[3], plain):
        draw.manual_seed(2)
        states = [
            plain.AdamWState(
                *(torch.randn(shape, generator=draw) for _ in range(3)), torch.rand(shape, generator=draw), weight
            )
            for shape, weight in (((3, 1000), torch.zeros(3, 1000, dtype=torch.float16)), ((5,), None))
        ]
        module.adamw(states, corrections, terms)
        results.append([tensor for s in states for tensor in (s.master, s.mean, s.square, s.weight, s.grad)])
    for got, wanted in zip(*results, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-3 if wanted.dtype == torch.float16 else 1e-5, atol=1e-6)


def test_vocabulary(fused):
    logits, rows, scale = 3 * torch.randn(4, 9000), torch.tensor([0, 8999, -1, 8192]), 0.7
    found = fused[1].vocab_statistics(logits.clone(), rows, scale)
    for got, wanted in zip(found, plain.vocab_statistics(logits.clone(), rows, scale), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    z = logits * scale
    logsum = z.logsumexp(-1)
    entropy = logsum - (z.softmax(-1) * z).sum(-1)
    rest = (rows, scale, logsum, entropy, torch.randn(4), torch.randn(4))
    got, wanted = (module.vocab_gradient(logits.clone(), *rest) for module in (fused[1], plain))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_selective_recomputation_changes_no_bit(make_trainer, tiny, batch):
    runs = []
    for recompute in ("none", "selective"):
        trainer = make_trainer(tiny, recompute=recompute, dtype="bfloat16")
        steps = [trainer.step(batch, sft_loss) for _ in range(2)]
        weights = [param.detach().clone() for param in trainer.params.values()]
        runs.append(([(step.loss, step.grad_norm) for step in steps], weights))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_offload_and_back_changes_nothing(make_trainer, tiny, batch):
    losses = []
    for moves in (False, True):
        trainer = make_trainer(tiny, dtype="bfloat16")
        trainer.step(batch, sft_loss)
        if moves:
            out = trainer.offload()
            assert out.bytes_copied > 0
            assert out.bytes_dropped > 0
            with pytest.raises(TrainerError, match="offloaded"):
                trainer.step(batch, sft_loss)
            with pytest.raises(TrainerError, match="cannot offload"):
                trainer.offload()
            assert trainer.onload().bytes_copied == out.bytes_copied
        losses.append([trainer.step(batch, sft_loss).grad_norm for _ in range(2)])
    assert losses[0] == losses[1]


def test_without_host_memory_nothing_moves(make_trainer, tiny, batch, monkeypatch):
    trainer = make_trainer(tiny, dtype="bfloat16")
    first = trainer.step(batch, sft_loss)
    monkeypatch.setattr("vime_megatron.offload._SLAB_BYTES", 1 << 60)
    with pytest.raises(TrainerError, match="nothing was moved"):
        trainer.offload()
    assert trainer.memory()["offloaded_gib"] == 0
    assert trainer.step(batch, sft_loss).loss < first.loss


def test_weights_stay_once_their_addresses_are_out(make_trainer, tiny):
    trainer = make_trainer(tiny)
    trainer.source()
    with pytest.raises(TrainerError, match="weights cannot leave"):
        trainer.offload(["weights"])
