"""How far two bfloat16 forward passes of one model disagree that differ in nothing but the order of their sums.

    python integration/benchmarks/rounding.py CONFIG.toml --set model.path=MODEL --out rounding.json

Trainer and engine multiply the same bfloat16 numbers in kernels that add in different orders. Every product is summed
in float32 and rounded to bfloat16; where two sums fall on different sides of a rounding the results differ by 2^-8, and
the layers carry it on. This script samples responses from a model in float32, and scores them in bfloat16 on the CPU:
with each product summed in one piece, and summed in four pieces; and in float32 throughout. The mean difference of the
sampled tokens' logprobs between the first two is what no care about positions, masks or settings can remove, short of
kernels that add in the same order on both sides.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import transformers
import typer
from torch import Tensor
from vime_grpo import load_config
from vime_integration.translate import data_config
from vime_rollout import Encoder, open_data_source

Product = Callable[..., Tensor]


def in_pieces(pieces: int) -> Product:
    """Return a product of half-precision factors that sums so many stretches of the inner axis one after the other."""

    def product(x_tk: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        parts = zip(x_tk.float().chunk(pieces, dim=-1), weight_nk.float().chunk(pieces, dim=-1), strict=True)
        sum_tn = torch.stack([part_tp @ weight_np.t() for part_tp, weight_np in parts]).sum(dim=0).to(x_tk.dtype)
        return sum_tn if bias_n is None else sum_tn + bias_n

    return product


def score(model: Any, rows: list[tuple[Tensor, int]], product: Product | None) -> Tensor:
    """Return the logprobs of the responses' tokens, end to end.

    Args:
        model: A causal language model of transformers.
        rows: Token ids ``[1, S]`` of prompt and response, and the prompt's length.
        product: How linear layers multiply; None leaves them alone.
    """
    functional = torch.nn.functional
    linear = functional.linear if product is None else product
    with mock.patch.object(functional, "linear", linear), torch.no_grad():
        states = [model.model(tokens_1s).last_hidden_state for tokens_1s, _ in rows]
    head_vm, found = model.lm_head.weight.float(), []
    for (tokens_1s, prompt), state_1sm in zip(rows, states, strict=True):
        logp_rv = torch.log_softmax(
            state_1sm[0, prompt - 1 : -1].float() @ head_vm.t(), dim=-1
        )  # as trainer and engine
        found.append(logp_rv.gather(1, tokens_1s[0, prompt:, None])[:, 0])
    return torch.cat(found)


def main(
    config: Path,
    out: Annotated[Path, typer.Option()],
    changes: Annotated[list[str] | None, typer.Option("--set")] = None,
    prompts: int = 24,
) -> None:
    """Sample, score and compare."""
    settings = load_config(config, changes or [])
    encoder = Encoder(settings.model.path)
    source = open_data_source(data_config(settings), encoder)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    rows = []
    for prompt in source.next(prompts):
        ids_1p = torch.tensor([encoder.encode(prompt).tokens])
        most = settings.rollout.max_response_tokens
        rows.append((model.generate(ids_1p, do_sample=True, top_k=0, max_new_tokens=most), ids_1p.shape[1]))
    exact = score(model, rows, None)
    model = model.to(torch.bfloat16)
    one, four = (score(model, rows, in_pieces(pieces)) for pieces in (1, 4))
    pairs = {
        "one piece, four pieces": one - four,
        "one piece, float32": one - exact,
        "four pieces, float32": four - exact,
    }
    report = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompts": prompts,
        "tokens": len(exact),
        "mean_logprob": float(exact.mean()),
        "mean_absolute_difference": {name: float(difference.abs().mean()) for name, difference in pairs.items()},
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(report["mean_absolute_difference"]) + "\n")


if __name__ == "__main__":
    typer.run(main)
