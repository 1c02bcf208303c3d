"""Measurements of single steps: ceilings, core attention, fused kernels, the vocabulary.

Times are medians over repeats between device events, after a warm-up; a case that fails is recorded by its error, and
the next one runs.

Suffixes as in ``vime_megatron.kernels.plain``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from arms import EVEN, MIXED
from torch import Tensor
from vime_megatron.kernels import PLAIN, triton_kernels
from vime_megatron.kernels import layer as layer_kernels
from vime_megatron.kernels import vocab as vocab_kernels
from vime_megatron.kernels.plain import HeadLayout
from vime_megatron.logprobs import VocabShard, token_logprobs
from vime_megatron.model.core_attention import row_by_row, sdpa_attention, varlen_attention
from vime_megatron.model.packing import PackedTokens, inverse_frequencies, pack

Save = Callable[[dict[str, Any]], None]
TOKENS = 16384


def timed(action: Callable[[], Any], repeats: int = 10, warmup: int = 3) -> float:
    """Return the median milliseconds of an action on the GPU."""
    for _ in range(warmup):
        action()
    spans = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop))
    return statistics.median(spans)


def extra_bytes(action: Callable[[], Any]) -> int:
    """Return the peak memory of an action beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _try(results: dict[str, Any], name: str, action: Callable[[], dict[str, Any]], save: Save) -> None:
    try:
        results[name] = action()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        results[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(name, results[name], flush=True)
    save(results)


def run(kind: str, save: Save) -> dict[str, Any]:
    """Run one kind of measurement."""
    results: dict[str, Any] = {}
    kinds = {
        "ceilings": _ceilings, "attention": _attention, "kernels": _kernels, "logprobs": _logprobs,
        "vocabulary": _vocabulary,
    }  # fmt: skip
    kinds[kind](results, save)
    return results | {"summary": {name: value for name, value in results.items() if isinstance(value, dict)}}


def _randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def _ceilings(results: dict[str, Any], save: Save) -> None:
    def product() -> dict[str, Any]:
        a, b = _randn(8192, 8192), _randn(8192, 8192)
        return {"tflops": round(2 * 8192**3 / timed(lambda: a @ b) / 1e9)}

    def copy() -> dict[str, Any]:
        a = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
        b = torch.empty_like(a)
        return {"read_plus_write_gb_s": round(2 * a.numel() / timed(lambda: b.copy_(a)) / 1e6)}

    for name, action in (("product", product), ("copy", copy), ("pinned", pinned)):
        _try(results, name, action, save)


def pinned() -> dict[str, Any]:
    """Measure plain copies of 1 GiB between pinned memory and the device."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    out = timed(lambda: host.copy_(device, non_blocking=True))
    back = timed(lambda: device.copy_(host, non_blocking=True))
    return {"to_host_gb_s": round(2**30 / out / 1e6, 1), "to_device_gb_s": round(2**30 / back / 1e6, 1)}


def _row(lengths: list[int]) -> PackedTokens:
    documents = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    return pack(documents, inverse_frequencies=inverse_frequencies(128, 1e6), device=torch.device("cuda"))


def _measure_attention(backend: Any, lengths: list[int]) -> dict[str, Any]:
    row = _row(lengths)
    work = sum(2 * 16 * 128 * n * n for n in lengths)  # causal: half of 4 n^2 h e
    q, k, v = (_randn(TOKENS, heads, 128, grad=True) for heads in (16, 8, 8))
    grad = _randn(TOKENS, 16, 128)
    truth = sdpa_attention(q.detach().float(), k.detach().float(), v.detach().float(), row)
    out = backend(q, k, v, row)
    error = float((out.detach().float() - truth).norm() / truth.norm())
    forward = timed(lambda: backend(q.detach(), k.detach(), v.detach(), row))
    both = timed(lambda: torch.autograd.grad(backend(q, k, v, row), (q, k, v), grad))
    return {
        "error": round(error, 5), "forward_ms": round(forward, 3), "both_ms": round(both, 3),
        "forward_tflops": round(work / forward / 1e9),
        "backward_tflops": round(2.5 * work / (both - forward) / 1e9),
    }  # fmt: skip


def _attention(results: dict[str, Any], save: Save) -> None:
    backends = {
        "varlen": varlen_attention,
        "sdpa": sdpa_attention,
        "auto": row_by_row(sdpa_attention, varlen_attention),
    }
    for layout, lengths in (("even", EVEN), ("mixed", MIXED)):
        for name, backend in backends.items():
            _try(results, f"{layout}-{name}", partial(_measure_attention, backend, lengths), save)


def _kernels(results: dict[str, Any], save: Save) -> None:
    fused = triton_kernels(torch.device("cuda"))
    row = _row(EVEN)
    layout = HeadLayout(16, 8, 128, 1e-6)
    x = _randn(TOKENS, 2 * 6144, grad=True)
    qkv = _randn(TOKENS, 32 * 128, grad=True)
    weights = _randn(128, grad=True), _randn(128, grad=True)
    grads = _randn(TOKENS, 16, 128), _randn(TOKENS, 8, 128), _randn(TOKENS, 8, 128)
    grad = _randn(TOKENS, 6144)

    def silu(function: Any) -> dict[str, Any]:
        forward = timed(lambda: function(x.detach()))
        both = timed(lambda: torch.autograd.grad(function(x), x, grad))
        moved = TOKENS * 6144 * 2
        return {
            "forward_ms": round(forward, 3), "backward_ms": round(both - forward, 3),
            "forward_gb_s": round(3 * moved / forward / 1e6),
            "backward_gb_s": round(5 * moved / (both - forward) / 1e6),
        }  # fmt: skip

    def heads(function: Any) -> dict[str, Any]:
        def forward_only() -> Any:
            return function(qkv.detach(), *(w.detach() for w in weights), row.cos_td, row.sin_td, layout)

        def there_and_back() -> Any:
            outputs = function(qkv, *weights, row.cos_td, row.sin_td, layout)
            return torch.autograd.grad(outputs, (qkv, *weights), grads)

        forward, both = timed(forward_only), timed(there_and_back)
        return {"forward_ms": round(forward, 3), "backward_ms": round(both - forward, 3)}

    for name, kernels in (("torch", PLAIN), ("triton", fused)):
        _try(results, f"gated_silu-{name}", lambda k=kernels: silu(k.gated_silu), save)
        _try(results, f"query_key_value-{name}", lambda k=kernels: heads(k.query_key_value), save)
    _try(results, "gated_silu-compiled", lambda: silu(torch.compile(PLAIN.gated_silu)), save)
    _try(results, "query_key_value-compiled", lambda: heads(torch.compile(PLAIN.query_key_value)), save)


def _logprobs(results: dict[str, Any], save: Save) -> None:
    count, vocab = 32768, 151936
    fused = triton_kernels(torch.device("cuda"))
    for width in (2048, 4096):
        hidden, weight = _randn(count, width, grad=True), _randn(vocab, width, grad=True)
        with torch.no_grad():
            hidden.mul_(width**-0.25)
            weight.mul_(width**-0.25)
        targets = torch.randint(0, vocab, (count,), device="cuda")

        def alone(chunk: int, hidden: Tensor = hidden, weight: Tensor = weight) -> float:
            def products() -> None:
                for part in hidden.detach().split(chunk):
                    part @ weight.detach().t()

            return timed(products, repeats=5)

        best = min(alone(chunk) for chunk in (1024, 2048, 4096))
        results[f"{width}-matmul"] = {"ms": round(best, 2), "tflops": round(2 * count * vocab * width / best / 1e9)}
        for name, kernels in (("torch", PLAIN), ("triton", fused)):
            for chunk in (1024, 2048, 4096) if name == "triton" else (1024,):

                def measure(
                    kernels: Any = kernels, chunk: int = chunk, best: float = best,
                    hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets,
                ) -> dict[str, Any]:  # fmt: skip
                    shard = VocabShard(0, vocab, None, chunk, kernels)

                    def score(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
                        return token_logprobs(h, w, targets, temperature=1.0, shard=shard)

                    def both() -> None:
                        logprobs, entropy = score(hidden, weight)
                        torch.autograd.grad(logprobs.sum() + 0.01 * entropy.sum(), (hidden, weight))

                    with torch.no_grad():
                        forward = timed(lambda: score(hidden, weight), repeats=5)
                        extra = extra_bytes(lambda: score(hidden, weight))
                    total = timed(both, repeats=3)
                    return {
                        "forward_ms": round(forward, 2), "over_matmul": round(forward / best - 1, 3),
                        "extra_gb": round(extra / 1e9, 3), "both_ms": round(total, 2),
                        "both_over_4_matmuls": round(total / (4 * best) - 1, 3),
                        "both_extra_gb": round(extra_bytes(both) / 1e9, 3),
                    }  # fmt: skip

                _try(results, f"{width}-{name}-{chunk}", measure, save)


def _vocabulary(results: dict[str, Any], save: Save) -> None:
    """Sweep what the log-probabilities' time depends on: tokens of a chunk, and the shape of the kernel's programs."""
    count, vocab, width = 32768, 151936, 2048
    hidden, weight = _randn(count, width), _randn(vocab, width)
    hidden.mul_(width**-0.25)
    weight.mul_(width**-0.25)
    targets = torch.randint(0, vocab, (count,), device="cuda")
    shard = VocabShard(0, vocab, None, 2048, triton_kernels(torch.device("cuda")))

    def products(chunk: int) -> None:
        for part in hidden.split(chunk):
            part @ weight.t()

    def score(chunk: int) -> None:
        token_logprobs(hidden, weight, targets, temperature=1.0, shard=replace(shard, chunk=chunk))

    def statistics_of(block: int, warps: int, logits: Tensor, rows: Tensor) -> dict[str, Any]:
        kept = vocab_kernels._STATISTICS_BLOCK_V, vocab_kernels._STATISTICS_WARPS
        vocab_kernels._STATISTICS_BLOCK_V, vocab_kernels._STATISTICS_WARPS = block, warps
        try:
            spent = timed(lambda: vocab_kernels.vocab_statistics(logits, rows, 1.0))
        finally:
            vocab_kernels._STATISTICS_BLOCK_V, vocab_kernels._STATISTICS_WARPS = kept
        return {"ms": round(spent, 4), "gb_s": round(2 * logits.numel() / spent / 1e6)}

    chunks = (1024, 2048, 4096)
    with torch.no_grad():
        alone = {chunk: timed(partial(products, chunk), repeats=5) for chunk in chunks}
        best = min(alone.values())
        results["matmul"] = {"ms": {chunk: round(spent, 2) for chunk, spent in alone.items()}}
        for chunk in chunks:
            spent = timed(partial(score, chunk), repeats=7)
            results[f"chunk-{chunk}"] = {
                "ms": round(spent, 2), "over_matmul": round(spent / best - 1, 4),
                "extra_gb": round(extra_bytes(partial(score, chunk)) / 1e9, 3),
            }  # fmt: skip
            save(results)
        logits = hidden[:2048] @ weight.t()
        for block, warps in ((4096, 4), (8192, 8), (8192, 4), (4096, 2), (16384, 8), (16384, 16)):
            measure = partial(statistics_of, block, warps, logits, targets[:2048])
            _try(results, f"block-{block}-warps-{warps}", measure, save)
        for tokens in (16, 32, 64):
            _try(results, f"heads-{tokens}-tokens", partial(_heads_alone, tokens), save)


def _heads_alone(tokens: int) -> dict[str, Any]:
    """Time the kernels that norm and rotate 16 query heads, without autograd around them."""
    row, weight = _row(EVEN), _randn(128)
    qkv, grad, dx = _randn(TOKENS, 32 * 128), _randn(TOKENS, 16, 128), _randn(TOKENS, 32 * 128)
    kept, layer_kernels._BLOCK_T = layer_kernels._BLOCK_T, tokens
    try:
        turn = timed(lambda: layer_kernels._turn(qkv, weight, row.cos_td, row.sin_td, 16, 1e-6))
        unturn = timed(lambda: layer_kernels._unturn(qkv, grad, dx, weight, row.cos_td, row.sin_td, 1e-6))
    finally:
        layer_kernels._BLOCK_T = kept
    return {"forward_ms": round(turn, 4), "backward_ms": round(unturn, 4)}
