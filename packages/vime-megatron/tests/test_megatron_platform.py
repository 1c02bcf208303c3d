"""The CPU layer: refuses beside a GPU, answers for CUDA inside its context, leaves nothing behind."""

from __future__ import annotations

import importlib

import pytest
import torch
import vime_megatron.platform.cpu as cpu
from vime_megatron import PlatformError
from vime_megatron.platform import select_platform


def test_it_refuses_to_load_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(PlatformError, match="where a GPU exists"):
        importlib.reload(cpu)


def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(PlatformError, match="device index 0"):
        select_platform("cuda")


def test_cuda_means_cpu_only_inside_the_context():
    platform = cpu.CpuPlatform()
    before = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.get_rng_state)
    with platform.active(), platform.active():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        assert torch.ones(1).to("cuda").device.type == "cpu"
        assert torch.ones(1).to(torch.device("cuda", 0)).device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.float64).dtype is torch.float64
        assert torch.cuda.current_device() == torch.device("cpu")
    assert before == (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.get_rng_state)
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_an_error_inside_puts_everything_back():
    platform, before = cpu.CpuPlatform(), torch.cuda.current_device
    with pytest.raises(ZeroDivisionError), platform.active():
        raise ZeroDivisionError
    assert torch.cuda.current_device is before
