"""Products that the matrix library may not have: float32 logits of half-precision factors, experts in one kernel."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from vime_megatron.kernels import HalfTypes, plain, select_kernels, triton_kernels
from vime_megatron.logprobs import settle_logits
from vime_megatron.model import moe

CPU, GPU, HALF = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16


@pytest.fixture
def torch_2_7(monkeypatch):
    """A torch before 2.8, whose ``mm`` has no overload with an output type, nor 2.10's product of groups."""
    monkeypatch.setattr(torch.ops.aten, "mm", SimpleNamespace(default=torch.ops.aten.mm.default))
    monkeypatch.setattr(torch.ops.aten, "addmm", SimpleNamespace(default=torch.ops.aten.addmm.default))
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)


@pytest.mark.parametrize("dtype", HalfTypes)
def test_copies_of_a_few_rows_at_a_time_give_the_exact_product(monkeypatch, dtype):
    monkeypatch.setattr(plain, "_COPIED_ROWS", 7)
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 24, generator=draw).to(dtype) for n in (5, 30))
    found = plain.product(a, b)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), a.double() @ b.double().t(), rtol=1e-6, atol=1e-6)
    assert (found - (a @ b.t()).float()).abs().max() > 1e-3  # what rounding to half precision would cost


def test_a_torch_without_the_overload_is_told_by_its_name(torch_2_7):
    assert not plain.wide_products_work(GPU)
    assert not plain.wide_sums_work(GPU)
    assert select_kernels("torch", GPU, HALF).product is plain.product
    assert moe.expert_product(GPU, HALF) == "one product each"


def test_a_library_that_cannot_is_found_out_by_trying():
    """torch's product for CPUs has no output type, whatever the overload says."""
    assert not plain.wide_products_work(CPU)


def test_triton_kernels_multiply_alike_without_the_overload(torch_2_7):
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    kernels = triton_kernels(GPU)
    assert kernels.product is plain.product
    assert kernels.accumulate is plain.accumulate


def test_slow_logits_are_said_once(torch_2_7, caplog):
    kernels = select_kernels("torch", GPU, HALF)
    with caplog.at_level(logging.WARNING):
        said = [settle_logits("float32", HALF, GPU, kernels, rank=rank) for rank in range(4)]
    assert said == ["float32 from float32 copies"] * 4
    [record] = caplog.records
    assert torch.__version__ in record.getMessage()
    assert "use torch 2.8 or later, or head_dtype='model'" in record.getMessage()


@pytest.mark.parametrize(
    ("head", "dtype", "said"),
    [("model", HALF, "bfloat16"), ("model", torch.float32, "float32"), ("float32", torch.float32, "float32")],
)
def test_logits_of_the_weights_type_need_nothing(torch_2_7, caplog, head, dtype, said):
    assert settle_logits(head, dtype, GPU, select_kernels("torch", GPU, dtype), rank=0) == said
    assert not caplog.records


def test_the_trainer_names_its_products(make_trainer, model_of, batch, caplog):
    trainer = make_trainer(model_of("qwen3-moe"), dtype="bfloat16", head_dtype="float32")
    assert trainer.choices["logits"] == "float32 from float32 copies"
    assert trainer.choices["experts"] == "one product each"
    assert not [record for record in caplog.records if "float32 copies" in record.getMessage()]  # a CPU has no other
    half = make_trainer(model_of("qwen3-moe"), dtype="bfloat16")
    assert half.choices["logits"] == "bfloat16"
