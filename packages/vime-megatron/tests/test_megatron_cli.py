"""The commands: a memory plan that counts what the trainer allocates, and conversion both ways."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner
from vime_megatron import MegatronTrainer, TrainerConfig
from vime_megatron.cli import app
from vime_megatron.memory import count_parameters, plan_memory


def call(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("kind", ["qwen3", "qwen2-tied", "llama", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_what_the_trainer_holds(make_trainer, model_of, batch, kind, dtype):
    from vime_megatron import sft_loss

    trainer = make_trainer(model_of(kind), dtype=dtype)
    trainer.step(batch, sft_loss)
    found = plan_memory(trainer.config)
    assert found.parameters == sum(param.numel() for param in trainer.params.values())
    assert found.parameters == count_parameters(trainer.shape)
    assert found.weights == sum(param.numel() * param.element_size() for param in trainer.params.values())
    assert found.gradients == 4 * found.parameters
    moments = [t for t in trainer._movable()["optimizer"] if t.dim() > 0 and not trainer.owns(t)]
    assert found.optimizer == sum(tensor.numel() * tensor.element_size() for tensor in moments)


def test_sharding_divides_the_plan(model_of):
    model = model_of("qwen3-moe")
    whole = plan_memory(TrainerConfig(model=model))
    shared = plan_memory(TrainerConfig(model=model, context_parallel=2), world_size=2)
    assert (shared.weights, 2 * shared.activations) == (whole.weights, pytest.approx(whole.activations, rel=1e-3))
    for name, world in (("tensor_parallel", 2), ("pipeline_parallel", 2), ("expert_parallel", 2)):
        part = plan_memory(TrainerConfig(model=model, **{name: 2}), world_size=world)
        assert 0.4 * whole.weights < part.weights < whole.weights, name
    full, none = (plan_memory(TrainerConfig(model=model, recompute=kind)).activations for kind in ("full", "none"))
    assert full < none


def test_plan_says_fit_or_no_fit(tiny, tmp_path):
    assert "of 140: fits" in call("plan", "--model", tiny, "--gpu-gib", 140)
    assert "does NOT fit" in call("plan", "--model", tiny, "--gpu-gib", 1, status=2)
    assert "a multiple of tensor x pipeline x context = 4" in call(
        "plan", "--model", tiny, "--gpu-gib", 140, "--gpus", 2, "--tensor", 2, "--context", 2, status=1
    )
    assert "no such folder" in call("plan", "--model", tmp_path / "none", "--gpu-gib", 1, status=1)


def test_a_folder_becomes_a_checkpoint_and_a_folder_again(tiny, tmp_path):
    call("convert", "--from", tiny, "--to", tmp_path / "saved", "--dtype", "float32")
    trainer = MegatronTrainer(TrainerConfig(model=tiny, dtype="float32", seed=9))
    trainer.load(tmp_path / "saved")
    trainer.close()
    assert "add --model" in call("convert", "--from", tmp_path / "saved", "--to", tmp_path / "hf", status=1)
    said = call("convert", "--from", tmp_path / "saved", "--to", tmp_path / "hf", "--model", tiny)
    assert "reading the checkpoint" in said
    assert "writing the folder" in said
    wanted, found = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "hf"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_torchrun_shares_a_conversion(tiny, tmp_path):
    """Two processes write a checkpoint, one reads it."""
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    order = ["convert", "--from", tiny, "--to", tmp_path / "saved", "--tensor", "2", "--dtype", "float32"]
    command = [*run, "-m", "vime_megatron", *map(str, order), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checkpoint at step 0") == 1
    assert (tmp_path / "saved" / "__1_0.distcp").is_file()
    call("convert", "--from", tmp_path / "saved", "--to", tmp_path / "hf", "--model", tiny)
    wanted, found = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "hf"))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_errors_are_text(tmp_path):
    output = call("convert", "--from", tmp_path / "nowhere", "--to", tmp_path / "x", status=1)
    assert "error: not a model folder" in output
    assert "Traceback" not in output
    (tmp_path / "manifest.json").write_text("{")
    assert "the manifest is not JSON" in call("convert", "--from", tmp_path, "--to", tmp_path / "x", status=1)
