"""Experts: the router's choice, the two ways to multiply, and stacks that an engine could use as they lie."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from vime_megatron import ModelError, check_model, sft_loss
from vime_megatron.model.moe import expert_matmul, grouped_matmul, route


def test_weights_of_the_chosen_sum_to_one_only_when_normalised():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    weights, experts = route(logits, 2, normalise=True)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[3.0, 2.0]]).softmax(-1))
    weights, _ = route(logits, 2, normalise=False)
    torch.testing.assert_close(weights, logits.softmax(-1)[:, 1:3])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="grouped_mm is in torch 2.10 and later")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_multiplies_as_the_loop_does(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 16, generator=generator).to(dtype).requires_grad_()
    stack = torch.randn(3, 8, 16, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(11, 8, generator=generator).to(dtype)
    results = []
    for matmul in (expert_matmul, grouped_matmul):
        out = matmul(rows, stack, [4, 0, 7])
        results.append([out, *torch.autograd.grad(out, (rows, stack), grad)])
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, loop)


def test_an_expert_s_matrices_lie_together(make_trainer, model_of):
    trainer = make_trainer(model_of("qwen3-moe"))
    tensors = load_file(model_of("qwen3-moe") / "model.safetensors")
    stack = trainer.params["decoder.layers.1.mlp.experts_fc1"].detach().view(4, 48, 32)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}."
        both = torch.cat((tensors[name + "gate_proj.weight"], tensors[name + "up_proj.weight"]))
        assert torch.equal(stack[expert], both)


def test_router_and_experts_learn(make_trainer, model_of, batch):
    trainer = make_trainer(model_of("qwen3-moe"))
    before = {name: param.detach().clone() for name, param in trainer.params.items()}
    losses = [trainer.step(batch, sft_loss).loss for _ in range(10)]
    assert losses[-1] < 0.6 * losses[0]
    assert all(not torch.equal(before[name], param) for name, param in trainer.params.items())


def test_layers_without_experts_are_refused(model_of, tmp_path):
    import json

    config = json.loads((model_of("qwen3-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [1]}))
    with pytest.raises(ModelError, match=r"mlp_only_layers=\[1\]"):
        check_model(tmp_path)
    assert check_model(model_of("qwen3-moe")).experts == 4


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(make_trainer, model_of, batch, recompute):
    plain = make_trainer(model_of("qwen3-moe")).step(batch, sft_loss)
    again = make_trainer(model_of("qwen3-moe"), recompute=recompute).step(batch, sft_loss)
    assert (again.loss, again.grad_norm) == (plain.loss, plain.grad_norm)
