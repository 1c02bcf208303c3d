"""What only a GPU can show: fused kernels as compiled, attention by both of torch's kernels, real offload and peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vime_megatron import sft_loss
from vime_megatron.kernels import PLAIN, HalfTypes, plain, select_kernels
from vime_megatron.kernels.plain import HeadLayout
from vime_megatron.logprobs import VocabShard, token_logprobs
from vime_megatron.loss_scale import LARGEST, LossScale
from vime_megatron.model.attention_choice import core_attention, obstacles
from vime_megatron.model.packing import inverse_frequencies, pack

DEVICE = torch.device("cuda")
HALVES = pytest.mark.parametrize("half", HalfTypes, ids=["bfloat16", "float16"])

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU"),
]


def draw(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def outputs_and_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [draw(*out.shape, dtype=out.dtype) for out in outputs])]


def assert_close_in_half(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.03, atol=0.03 * float(b.float().abs().max()))


@HALVES
def test_compiled_kernels_compute_what_plain_torch_does(half):
    fused = select_kernels("auto", DEVICE, half)
    assert fused.name.startswith("triton")
    x = [draw(300, 2 * 640, dtype=half)]
    assert_close_in_half(*(outputs_and_gradients(k.gated_silu, x) for k in (fused, PLAIN)))
    stream = [draw(2048, dtype=half).abs(), draw(300, 1, 2048, dtype=half), draw(301, 1, 2048, dtype=half)[1:]]
    assert_close_in_half(
        *(outputs_and_gradients(lambda w, x, a, k=k: k.add_norm(x, a, w, 1e-6), stream) for k in (fused, PLAIN))
    )
    normed, total = fused.add_norm(stream[1], stream[2], stream[0], 1e-6)
    assert torch.equal(normed, fused.norm(total, stream[0], 1e-6))
    layout = HeadLayout(heads=8, groups=2, width=128, eps=1e-6)
    angles = draw(300, 64, dtype=torch.float32)
    inputs = [draw(300, 12 * 128, dtype=half), draw(128, dtype=half).abs(), draw(128, dtype=half).abs()]
    found, wanted = (
        outputs_and_gradients(
            lambda qkv, q, k, kernels=kernels: kernels.query_key_value(qkv, q, k, angles.cos(), angles.sin(), layout),
            inputs,
        )
        for kernels in (fused, PLAIN)
    )
    assert_close_in_half(found, wanted)


@HALVES
def test_logprobs_of_fused_and_plain_kernels_agree(half):
    hidden, weight = draw(200, 64, dtype=half), draw(5000, 64, dtype=half)
    targets = torch.arange(200, device=DEVICE)
    results = []
    for kernels in (select_kernels("auto", DEVICE, half), PLAIN):
        shard = VocabShard(start=0, rows=5000, group=None, chunk=64, kernels=kernels)

        def logprobs(h, w, shard=shard):
            return token_logprobs(h, w, targets, temperature=0.8, shard=shard)

        results.append(outputs_and_gradients(logprobs, [hidden, weight]))
    assert_close_in_half(*results)


@HALVES
def test_float32_logits_of_the_library_are_those_of_copies(half):
    if not plain.wide_products_work(DEVICE, half):
        pytest.skip("this build's matrix library does not multiply half precision into float32")
    hidden, weight = draw(70, 256, dtype=half), draw(9000, 256, dtype=half)
    found = plain.product_wide(hidden, weight)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, plain.product(hidden, weight), rtol=1e-4, atol=1e-3)


@HALVES
@pytest.mark.parametrize("name", ["varlen", "flash", "te"])
def test_ragged_attention_is_that_of_padded_groups(name, half):
    if obstacles(DEVICE, half)[name]:
        pytest.skip(obstacles(DEVICE, half)[name])
    documents = [torch.zeros(n, dtype=torch.int64) for n in (134, 700, 1, 65)]
    row = pack(documents, inverse_frequencies=inverse_frequencies(128, 10000.0), device=DEVICE)
    inputs = [draw(900, heads, 128, dtype=half) for heads in (8, 2, 2)]
    found, wanted = (
        outputs_and_gradients(lambda q, k, v, attend=attend: attend(q, k, v, row), inputs)
        for attend in (core_attention(name), core_attention("sdpa"))
    )
    assert_close_in_half(found, wanted)


def test_float32_products_are_exact():
    a, b = draw(256, 256, dtype=torch.float32), draw(256, 256, dtype=torch.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        from vime_megatron.platform.build import full_float32

        with full_float32():
            found = a @ b
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_a_background_save_continues_bit_for_bit(make_trainer, tiny, batch, tmp_path):
    trainer = make_trainer(tiny, dtype="bfloat16")
    trainer.step(batch, sft_loss)
    handle = trainer.save(tmp_path / "saved", asynchronous=True)
    wanted = [trainer.step(batch, sft_loss).loss for _ in range(2)]
    handle.wait(60.0)
    trainer.load(tmp_path / "saved")
    assert [trainer.step(batch, sft_loss).loss for _ in range(2)] == wanted


@HALVES
def test_fused_steps_train_as_plain_torch_does(make_trainer, tiny, batch, gradients_of, half):
    """Triton, ragged attention and sums inside the products against none of them: gradients and losses."""
    runs, dtype = [], str(half).removeprefix("torch.")
    for settings in ({}, {"kernels": "torch", "attention": "sdpa"}):
        trainer = make_trainer(tiny, dtype=dtype, optimizer={"lr": 1e-2, "clip_grad": 0.0}, **settings)
        # Before a step: torch's fused AdamW writes back what it has unscaled.
        runs.append((gradients_of(trainer, batch), [trainer.step(batch, sft_loss).loss for _ in range(4)]))
    for name, wanted in runs[1][0].items():
        assert float((runs[0][0][name] - wanted).norm() / wanted.norm()) < 0.05, name
    assert runs[0][1] == pytest.approx(runs[1][1], rel=0.02)


def test_an_overflow_on_the_device_is_computed_again(make_trainer, tiny, batch):
    """Weights after steps from a scale that overflows are those from the one that fits, to the bit."""
    runs = []
    for start in (LARGEST, None):
        trainer = make_trainer(tiny, dtype="float16", optimizer={"lr": 1e-2, "clip_grad": 0.5})
        trainer.state.loss_scale = LossScale(start or runs[0][0][0].loss_scale, window=100)
        steps = [trainer.step(batch, sft_loss) for _ in range(3)]
        runs.append((steps, [param.detach().clone() for param in trainer.params.values()]))
    assert runs[0][0][0].redos > 0
    assert [step.redos for step in runs[1][0]] == [0, 0, 0]
    assert [step.loss for step in runs[0][0]] == [step.loss for step in runs[1][0]]
    assert all(torch.equal(found, wanted) for found, wanted in zip(runs[0][1], runs[1][1], strict=True))


@HALVES
def test_the_update_is_torch_s(make_trainer, tiny, batch, half):
    runs = []
    for own in (True, False):
        dtype = str(half).removeprefix("torch.")
        trainer = make_trainer(tiny, dtype=dtype, optimizer={"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5})
        assert trainer._kernels.adamw is not None
        if not own:
            trainer._kernels = replace(trainer._kernels, adamw=None)
        for _ in range(3):
            trainer.step(batch, sft_loss)
        runs.append([param.detach().clone() for param in trainer.params.values()])
    for found, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=2e-3)


def test_offload_frees_what_it_says_and_peaks_are_reported(make_trainer, tiny, batch):
    trainer = make_trainer(tiny, dtype="bfloat16")
    before = trainer.step(batch, sft_loss)
    out = trainer.offload()
    assert out.bytes_copied > 0
    assert trainer.memory()["offloaded_gib"] > 0
    trainer.onload()
    assert trainer.step(batch, sft_loss).loss < before.loss
    report = trainer.memory()
    assert report["device_peak_gib.train"] >= report["device_gib"] > 0


@HALVES
def test_the_wide_sum_is_the_library_s_when_it_has_one(half):
    if not plain.wide_sums_work(DEVICE, half):
        pytest.skip("this build's matrix library does not add in float32")
    total = torch.zeros(32, 16, device=DEVICE)
    a, b = draw(64, 32, dtype=half), draw(64, 16, dtype=half)
    plain.accumulate_wide(total, a, b)
    torch.testing.assert_close(total, a.float().t() @ b.float(), rtol=1e-3, atol=1e-3)
