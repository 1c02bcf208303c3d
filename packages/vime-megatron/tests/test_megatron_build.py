"""Guards of the build, with the build's flags faked where no such hardware is: ROCm is unconfirmed on hardware."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from vime_megatron import PlatformError, TrainerConfig, check_model
from vime_megatron.losses import sft_loss
from vime_megatron.model.policy import transformer_config
from vime_megatron.platform import build


@pytest.fixture
def rocm(monkeypatch):
    """A build for HIP, as its flags tell."""
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # torch would ask AMD's library, which is not there


def test_the_build_is_named(monkeypatch, rocm):
    assert build.describe_build() == "HIP 7.1.25424"
    monkeypatch.setattr(torch.version, "hip", None)
    assert build.describe_build() == "CPU"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert build.describe_build() == "CUDA 13.0"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_no_extension_that_rocm_lacks_is_asked_for(rocm, model_of, kind):
    megatron = transformer_config(check_model(model_of(kind)), TrainerConfig(model=model_of(kind)))
    for _ in range(2):  # a guard may run again
        build.check_fusions(megatron)
    assert not any(getattr(megatron, option) for option in build._CUDA_FUSIONS)


def test_a_fusion_without_its_extension_is_refused(rocm, tiny):
    megatron = transformer_config(check_model(tiny), TrainerConfig(model=tiny))
    megatron.gradient_accumulation_fusion = True
    with pytest.raises(PlatformError, match=r"gradient_accumulation_fusion.*fused_weight_gradient_mlp_cuda") as caught:
        build.check_fusions(megatron)
    assert "HIP 7.1.25424" in str(caught.value)


def test_a_trainer_of_a_rocm_build_trains(rocm, make_trainer, tiny, batch):
    """The CPU of a ROCm build: nothing on the way looks for CUDA's version."""
    trainer = make_trainer(tiny)
    assert trainer.choices["build"].startswith("HIP")
    assert trainer.step(batch, sft_loss).grad_norm > 0


@pytest.fixture
def precision():
    """Put the process's precision back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("outside", ["medium", "high", "highest"])
def test_float32_products_are_exact_inside_and_as_before_outside(precision, outside):
    from vime_megatron.platform.cpu import CpuPlatform  # which refuses to load beside a GPU

    torch.set_float32_matmul_precision(outside)
    with CpuPlatform().active():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == outside
    with pytest.raises(ZeroDivisionError), build.full_float32():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == outside


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="settings by backend came with torch 2.9"
)
def test_settings_by_backend_are_put_back_too(precision):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with build.full_float32():
            assert matmul.fp32_precision != "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("outside", [True, False])
def test_float16_products_are_summed_in_float32_inside_and_as_before_outside(outside):
    matmul = torch.backends.cuda.matmul
    before, bfloat16 = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_fp16_reduced_precision_reduction = outside
        with build.full_float32():
            assert not matmul.allow_fp16_reduced_precision_reduction
            assert matmul.allow_bf16_reduced_precision_reduction == bfloat16
        assert matmul.allow_fp16_reduced_precision_reduction == outside
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before


def test_the_trainer_s_softmax_is_exact_whatever_the_process_has_set(precision, make_trainer, tiny, batch):
    wanted = make_trainer(tiny).logprobs(batch)
    torch.set_float32_matmul_precision("medium")
    found = make_trainer(tiny).logprobs(batch)
    assert all(torch.equal(wanted[index], found[index]) for index in wanted)


def test_a_fork_after_the_device_has_started_is_warned_of_once(monkeypatch, caplog, rocm):
    hooks = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, before: hooks.append(before))
    build.warn_of_forks.cache_clear()
    build.warn_of_forks()
    build.warn_of_forks()
    assert len(hooks) == 1
    with caplog.at_level("WARNING"):
        hooks[0]()
        hooks[0]()
    assert caplog.text.count("being forked after HIP 7.1.25424 has started") == 1
    build.warn_of_forks.cache_clear()


def test_settings_stay_what_they_are(tiny):
    config = TrainerConfig(model=tiny)
    assert replace(config, attention="te").attention == "te"
