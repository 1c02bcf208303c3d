"""Float16: nearer to float32 than bfloat16 is, scaled without a trace, and no batch lost to an overflow."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vime_megatron import GradientError, ModelError, OptimizerSettings, TrainerConfig, TrainerError, sft_loss
from vime_megatron.kernels import plain
from vime_megatron.loss_scale import INITIAL, LARGEST, SMALLEST, LossScale

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}


def weights_of(trainer):
    return {name: param.detach().clone() for name, param in trainer.params.items()}


def assert_equal(found, wanted):
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_it_is_nearer_to_float32_than_bfloat16(make_trainer, model_of, batch, gradients_of, kind):
    """A float16 has three bits more, so what rounding does is eight times less; four times is asked for here."""
    logprobs, gradients = {}, {}
    for dtype in ("float32", "bfloat16", "float16"):
        trainer = make_trainer(model_of(kind), dtype=dtype)
        scores = trainer.logprobs(batch)
        logprobs[dtype] = torch.cat([scores[index] for index in sorted(scores)])
        gradients[dtype] = gradients_of(trainer, batch)
    apart = {dtype: float((logprobs[dtype] - logprobs["float32"]).abs().mean()) for dtype in logprobs}
    assert 0 < apart["float16"] < min(4e-3, apart["bfloat16"] / 4)
    for name, wanted in gradients["float32"].items():
        off = {dtype: float((found[name] - wanted).norm() / wanted.norm()) for dtype, found in gradients.items()}
        assert off["float16"] < 0.02, name  # of a hundred roundings to 2^-11 each, some along the gradient itself


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("float32", {}), ("float32", {"distributed": True}), ("float32", {"clip_grad": 0.0}), ("bfloat16", {})],
    ids=["float32", "distributed", "no clipping", "one pass"],
)
def test_a_scale_leaves_no_trace_where_nothing_overflows(make_trainer, tiny, batch, dtype, settings):
    """A power of two moves exponents only, and these types have room for them: the same bits with any."""
    runs = []
    for scale in (1.0, 2.0**-9, 2.0**20):
        trainer = make_trainer(tiny, dtype=dtype, optimizer=SETTINGS | settings)
        if dtype == "bfloat16":
            trainer._kernels = replace(trainer._kernels, adamw=plain.adamw)  # which on a GPU Triton's does
        trainer.state.loss_scale = LossScale(scale)
        steps = [trainer.step(batch, sft_loss) for _ in range(3)]
        runs.append(([(step.loss, step.grad_norm, step.metrics) for step in steps], weights_of(trainer)))
    for metrics, weights in runs[1:]:
        assert metrics == runs[0][0]
        assert_equal(weights, runs[0][1])


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_overflow_is_computed_again_with_the_same_batch(make_trainer, model_of, batch, kind):
    settings = {"dtype": "float16", "max_tokens_per_microbatch": 40, "optimizer": SETTINGS}
    calls = []

    def loss(*given):
        calls.append(given)
        return sft_loss(*given)

    trainer = make_trainer(model_of(kind), **settings)
    trainer.state.loss_scale = LossScale(LARGEST, window=100)
    first = trainer.step(batch, loss)
    assert first.redos > 0  # a token's gradient is a fiftieth: 2^24 makes 3e5 of it
    assert first.loss_scale == LARGEST / 2**first.redos
    assert len(calls) % (first.redos + 1) == 0
    assert trainer.state.loss_scale == LossScale(first.loss_scale, good_steps=1, window=100)
    found = [first, trainer.step(batch, sft_loss)], weights_of(trainer)
    fresh = make_trainer(model_of(kind), **settings)
    fresh.state.loss_scale = LossScale(first.loss_scale, window=100)
    wanted = [fresh.step(batch, sft_loss) for _ in range(2)], weights_of(fresh)
    assert [(m.loss, m.grad_norm, m.lr, m.step) for m in found[0]] == [
        (m.loss, m.grad_norm, m.lr, m.step) for m in wanted[0]
    ]
    assert [m.redos for m in (*found[0][1:], *wanted[0])] == [0, 0, 0]
    assert_equal(found[1], wanted[1])


def test_a_fixed_scale_that_overflows_is_refused_and_named(make_trainer, tiny, batch):
    trainer = make_trainer(tiny, dtype="float16", optimizer=SETTINGS | {"loss_scale": LARGEST})
    before = weights_of(trainer)
    with pytest.raises(GradientError, match=r"with the loss scale 1\.67772e\+07; .*lower the loss scale") as raised:
        trainer.step(batch, sft_loss)
    assert "weight (" in raised.value.where
    assert_equal(weights_of(trainer), before)


def test_gradients_that_no_scale_helps_are_refused_and_leave_no_trace(make_trainer, tiny, batch):
    calls = []

    def broken(logprobs_t, entropy_t, fields):
        calls.append(len(logprobs_t))
        return (logprobs_t - logprobs_t.detach()).abs().sqrt().sum(), {}  # 0, with an infinite slope

    def run(*, disturbed):
        trainer = make_trainer(tiny, dtype="float16", optimizer=SETTINGS | {"warmup_steps": 5})
        trainer.step(batch, sft_loss)
        kept = trainer.state.loss_scale
        if disturbed:
            with pytest.raises(GradientError, match=r"linear_qkv|word_embeddings"):
                trainer.step(batch, broken)
        assert (trainer.state.step, trainer.state.loss_scale) == (1, kept)
        last = trainer.step(batch, sft_loss)
        return (last.loss, last.grad_norm, last.lr, last.loss_scale), weights_of(trainer)

    found, wanted = run(disturbed=True), run(disturbed=False)
    assert found[0] == wanted[0]
    assert_equal(found[1], wanted[1])
    assert len(calls) == math.log2(INITIAL / SMALLEST) + 1


def test_a_loss_that_is_not_finite_is_refused_at_once(make_trainer, tiny, batch):
    calls = []

    def broken(logprobs_t, entropy_t, fields):
        calls.append(len(logprobs_t))
        return logprobs_t.sum() * float("nan"), {}

    with pytest.raises(GradientError, match="loss nan"):
        make_trainer(tiny, dtype="float16").step(batch, broken)
    assert len(calls) == 1


def test_other_types_are_not_scaled_and_do_not_say_so(make_trainer, tiny, batch, tmp_path):
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(tiny, dtype=dtype)
        step = trainer.step(batch, sft_loss)
        assert (step.loss_scale, step.redos, trainer.state.loss_scale.value) == (None, 0, 1.0)
        assert trainer.model.config.grad_scale_func is None
        trainer.save(tmp_path / dtype)
        assert "loss_scale" not in json.loads((tmp_path / dtype / "manifest.json").read_text())


def test_a_checkpoint_keeps_scale_and_count(make_trainer, tiny, batch, tmp_path):
    def fresh(**optimizer):
        return make_trainer(tiny, dtype="float16", optimizer=SETTINGS | {"loss_scale_window": 3} | optimizer)

    trainer = fresh()
    trainer.state.loss_scale = LossScale(LARGEST, window=3)
    assert trainer.step(batch, sft_loss).redos > 0
    trainer.save(tmp_path / "saved")
    kept = trainer.state.loss_scale
    wanted = [(m.loss, m.loss_scale, m.redos) for m in (trainer.step(batch, sft_loss) for _ in range(3))]
    assert wanted[2][1] in (kept.value, 2 * kept.value)  # whether there is room is tried on the third
    again = fresh()
    again.load(tmp_path / "saved")
    assert (again.state.loss_scale, kept.good_steps) == (kept, 1)
    assert [(m.loss, m.loss_scale, m.redos) for m in (again.step(batch, sft_loss) for _ in range(3))] == wanted
    fixed = fresh(loss_scale=8.0)
    fixed.load(tmp_path / "saved")
    assert fixed.state.loss_scale == LossScale(8.0)  # what is set holds
    manifest = tmp_path / "saved" / "manifest.json"
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != "loss_scale"}))
    again.load(tmp_path / "saved")
    assert again.state.loss_scale == LossScale(INITIAL, window=3)


LAYOUTS = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "dp2-distributed": {},
    "pp2": {"pipeline_parallel": 2, "max_tokens_per_microbatch": 40},
}
# A large eps: with the usual one an update is the gradient's sign, which rounding decides where that is near 0.
PROPORTIONAL = {"lr": 0.3, "eps": 1.0, "clip_grad": 0.5}


@pytest.fixture(scope="module")
def alone(ranks, model_of):
    """One rank's steps from a scale that overflows."""
    return ranks("float16", 1, model=str(model_of("qwen3-tied")), start=LARGEST, settings={}, optimizer=PROPORTIONAL)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_decide_alike_and_equal_one(ranks, model_of, alone, layout):
    """On every rank; roundings fall elsewhere than on one rank, by 2^-11 each."""
    optimizer = PROPORTIONAL | {"distributed": layout.endswith("distributed")}
    arguments = {"model": str(model_of("qwen3-tied")), "start": LARGEST, "settings": LAYOUTS[layout]}
    first, second = ranks("float16", 2, optimizer=optimizer, **arguments)
    assert first == second
    assert first["redos"][0] > 0
    for name in ("loss", "grad_norm"):
        assert first[name] == pytest.approx(alone[name], rel=5e-3), name


@pytest.mark.parametrize(("value", "said"), [(2.0**17, "131072"), (float("-inf"), "inf")])
def test_a_weight_that_it_cannot_hold_is_refused_by_name(make_trainer, tiny, tmp_path, value, said):
    tensors = load_file(tiny / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 4] = value
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    make_trainer(tmp_path, dtype="bfloat16")
    with pytest.raises(ModelError, match=rf"too large for float16.*{name}.*seen: {said}.*at most 65504"):
        make_trainer(tmp_path, dtype="float16")


def test_an_export_names_the_type_that_was_written(make_trainer, tiny, tmp_path):
    config = json.loads((tiny / "config.json").read_text()) | {"torch_dtype": "bfloat16", "name": "Müller"}
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype in ("float16", "bfloat16"):
        trainer = make_trainer(tmp_path, dtype=dtype)
        trainer.export_hf(tmp_path / dtype)
        assert json.loads((tmp_path / dtype / "config.json").read_text()) == config | {"torch_dtype": dtype}
        stored = load_file(tmp_path / dtype / "model.safetensors")
        assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    assert (tmp_path / "bfloat16" / "config.json").read_text() == json.dumps(config)  # byte for byte where it is right


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=200))
def test_a_scale_stays_a_power_of_two_within_its_bounds(window, events):
    scale, good = LossScale(INITIAL, window=window), 0
    for overflows in events:
        norm = math.inf if overflows else 1.0
        if overflows:
            assert scale.too_high(loss=1.0, norm=norm) == (scale.value > SMALLEST)
            new, good = scale.halved(), 0
            assert new.value == max(SMALLEST, scale.value / 2)
        else:
            assert not scale.too_high(loss=1.0, norm=norm)
            new, good = scale.after_step(), good + 1
            grows = good == window
            assert new.value == (min(LARGEST, 2 * scale.value) if grows else scale.value)
            good = 0 if grows else good
        scale = new
        assert scale.good_steps == good < window
        assert math.frexp(scale.value)[0] == 0.5
        assert scale.restored(scale.saved()) == scale == LossScale(window=window).restored(scale.saved())


def test_what_no_scale_mends_is_not_tried():
    scale = LossScale(8.0, window=5)
    assert scale.too_high(loss=1.0, norm=math.nan)
    assert not scale.too_high(loss=math.nan, norm=math.nan)
    assert not LossScale(8.0).too_high(loss=1.0, norm=math.inf)
    assert LossScale(8.0, window=0).after_step().value == 8.0


@pytest.mark.parametrize("value", ["static", 0.5, 3, 0, -2.0, math.inf, math.nan, True])
def test_a_scale_that_would_round_is_refused(value):
    with pytest.raises(TrainerError, match=r"optimizer\.loss_scale.*power of two, at least 1"):
        OptimizerSettings(loss_scale=value)


def test_a_scale_that_nothing_uses_is_refused():
    with pytest.raises(TrainerError, match=r"optimizer\.loss_scale.*not used, with dtype 'bfloat16'"):
        TrainerConfig(model="m", optimizer=OptimizerSettings(loss_scale=8))
    with pytest.raises(TrainerError, match=r"optimizer\.loss_scale_window.*at least 1"):
        OptimizerSettings(loss_scale_window=0)
