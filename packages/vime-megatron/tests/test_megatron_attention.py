"""The choice of a core attention: by what is installed, row by row, forced or refused; and the libraries' arguments."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from vime_megatron import PlatformError
from vime_megatron.model import attention_libraries
from vime_megatron.model.attention_choice import choose_attention, core_attention, obstacles
from vime_megatron.model.core_attention import row_by_row, sdpa_attention
from vime_megatron.model.packing import inverse_frequencies, pack

needs_varlen = pytest.mark.skipif(
    importlib.util.find_spec("torch.nn.attention.varlen") is None, reason="the kernel came with torch 2.10"
)
CPU, GPU, HALF = torch.device("cpu"), torch.device("cuda"), torch.bfloat16


def row_of(lengths):
    documents = [torch.arange(n) for n in lengths]
    return pack(documents, inverse_frequencies=inverse_frequencies(8, 10000.0), device=CPU)


def per_document(q, k, v, borders):
    """Causal attention of each document by itself, as the libraries' kernels define it."""
    outputs = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        document = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """Stands in for flash-attn 2's function of that name."""
    assert causal
    assert (dropout_p, softmax_scale) == (0.0, None)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.dtype is torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return per_document(q, k, v, cu_seqlens_q)


class DotProductAttention:
    """Stands in for TransformerEngine's module of that name."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd"):
        assert (num_attention_heads, kv_channels, num_gqa_groups) == (4, 8, 2)
        assert (attention_dropout, qkv_format) == (0.0, "thd")

    def __call__(
        self, q, k, v, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
    ):
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert max_seqlen_q == max_seqlen_kv
        return per_document(q, k, v, cu_seqlens_q).flatten(1)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that libraries are there, or not."""
    attention_libraries._module.cache_clear()

    def pretend(*names):
        parts = {
            "flash": ("flash_attn", {"flash_attn_varlen_func": flash_attn_varlen_func}),
            "te": ("transformer_engine.pytorch", {"DotProductAttention": DotProductAttention}),
        }
        for key, (module, content) in parts.items():
            path = module.split(".")
            for depth in range(len(path)):
                name = ".".join(path[: depth + 1])
                made = ModuleType(name)
                made.__path__ = []
                made.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)
                monkeypatch.setitem(sys.modules, name, made if key in names else None)
            if key in names:
                for name, value in content.items():
                    setattr(sys.modules[module], name, value)

    pretend()
    yield pretend
    attention_libraries._module.cache_clear()


@pytest.mark.parametrize("name", ["flash", "te"])
def test_a_library_is_called_with_its_own_arguments(installed, name):
    installed(name)
    assert choose_attention(name, GPU, HALF) == name
    row = row_of([5, 9, 6, 1])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(21, heads, 8, generator=generator) for heads in (4, 2, 2))
    torch.testing.assert_close(core_attention(name)(q, k, v, row), sdpa_attention(q, k, v, row), rtol=1e-4, atol=1e-5)


@needs_varlen
def test_the_choice_follows_what_is_there(installed, monkeypatch):
    assert choose_attention("auto", CPU, HALF) == "sdpa"
    assert choose_attention("auto", GPU, torch.float32) == "sdpa"
    assert choose_attention("auto", GPU, HALF) == "sdpa+varlen"
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert choose_attention("auto", GPU, HALF) == "sdpa"
    installed("flash", "te")
    assert choose_attention("auto", GPU, HALF) == "sdpa+flash"
    assert not any(reason for name, reason in obstacles(GPU, HALF).items() if name != "varlen")


@needs_varlen
def test_on_rocm_ragged_rows_go_to_flash_attn_or_stay_padded(installed, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert choose_attention("auto", GPU, HALF) == "sdpa"
    assert choose_attention("varlen", GPU, HALF) == "varlen"  # who asks for it gets it
    installed("flash")
    assert choose_attention("auto", GPU, HALF) == "sdpa+flash"


@pytest.mark.parametrize("name", ["varlen", "flash", "te"])
def test_what_is_forced_and_cannot_run_is_refused(installed, monkeypatch, name):
    with pytest.raises(PlatformError, match=rf"{name} attention cannot run here.*needs a GPU and half precision"):
        choose_attention(name, CPU, HALF)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(PlatformError, match=rf"{name} attention cannot run here.*what can run here: sdpa"):
        choose_attention(name, GPU, HALF)


def test_a_library_without_the_function_is_refused(installed):
    installed("flash")
    del sys.modules["flash_attn"].flash_attn_varlen_func
    with pytest.raises(PlatformError, match="flash_attn has no flash_attn_varlen_func"):
        choose_attention("flash", GPU, HALF)


@needs_varlen
def test_a_kernel_whose_arguments_changed_is_refused(monkeypatch):
    import torch.nn.attention.varlen as varlen
    from vime_megatron.model.core_attention import varlen_options

    varlen_options.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, borders: None)
    with pytest.raises(PlatformError, match=r"has changed its arguments.*borders"):
        choose_attention("auto", GPU, HALF)
    varlen_options.cache_clear()


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ([128, 128], "even"),
        ([256], "even"),
        ([100, 100], "ragged"),  # even, but no length that comes again
        ([128, 64], "ragged"),
        ([7], "ragged"),
    ],
)
def test_rows_go_to_the_backend_for_their_kind(lengths, taken):
    attend = row_by_row(lambda *_: "even", lambda *_: "ragged")
    assert attend(None, None, None, row_of(lengths)) == taken


def test_the_trainer_says_what_it_chose(make_trainer, tiny, caplog):
    with caplog.at_level("DEBUG", logger="vime_megatron"):
        trainer = make_trainer(tiny)
    assert trainer.choices == {
        "device": "cpu",
        "build": trainer.choices["build"],
        "attention": "sdpa",
        "kernels": "torch",
        "logits": "float32",
    }
    assert "attention sdpa, kernels torch" in caplog.text
    assert "no te attention: needs a GPU" in caplog.text
