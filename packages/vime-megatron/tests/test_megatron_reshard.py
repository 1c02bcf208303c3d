"""A checkpoint read in another layout goes on as one rank would have, uninterrupted."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from vime_megatron import CheckpointError, sft_loss
from vime_megatron.families.mapping import Placement
from vime_megatron.reshard import _intersect, _within

OPTIMIZER = {"lr": 0.3, "eps": 1.0, "clip_grad": 0.5, "weight_decay": 0.1}
TENSOR = (2, {"tensor_parallel": 2})
PIPELINE = (2, {"pipeline_parallel": 2})
EXPERT = (2, {"expert_parallel": 2})
ONE = (1, {})


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        ("qwen2-tied", TENSOR, ONE),
        ("qwen3-tied", PIPELINE, TENSOR),
        ("qwen3-moe", ONE, EXPERT),
    ],
    ids=["tensor-one", "pipeline-tensor", "one-expert"],
)
def test_training_goes_on_in_another_layout(ranks, model_of, tmp_path, kind, written, read):
    common = {"model": str(model_of(kind)), "optimizer": OPTIMIZER}
    [whole] = ranks("train", 1, settings={}, steps=4, export=str(tmp_path / "whole"), **common)
    world, settings = written
    first = ranks("train", world, settings=settings, save=str(tmp_path / "saved"), **common)
    world, settings = read
    load, export = str(tmp_path / "saved"), str(tmp_path / "hf")
    second = ranks("train", world, settings=settings, load=load, export=export, **common)
    losses = first[0]["loss"] + second[0]["loss"]
    assert losses == pytest.approx(whole["loss"], rel=1e-5)
    norms = first[0]["grad_norm"] + second[0]["grad_norm"]
    assert norms == pytest.approx(whole["grad_norm"], rel=1e-4)
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "hf"))
    assert wanted.keys() == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_boxes_carry_every_bit(make_trainer, model_of, batch, tmp_path, dtype):
    """One rank's checkpoint, read by one rank through the boxes as if the world had been another."""
    trainer = make_trainer(model_of("qwen3-moe"), dtype=dtype)
    trainer.step(batch, sft_loss)
    trainer.save(tmp_path / "saved")
    wanted = [trainer.step(batch, sft_loss).loss for _ in range(2)]
    path = tmp_path / "saved" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"world_size": 7}))
    again = make_trainer(model_of("qwen3-moe"), dtype=dtype, seed=5)
    again.load(tmp_path / "saved")
    assert again.state.step == 1
    assert [again.step(batch, sft_loss).loss for _ in range(2)] == wanted
    path.write_text(json.dumps({key: value for key, value in manifest.items() if key != "layouts"} | {"world_size": 7}))
    with pytest.raises(CheckpointError, match="which rank held what"):
        again.load(tmp_path / "saved")


def test_shards_of_the_distributed_optimiser_stay_in_their_layout(make_trainer, tiny, tmp_path):
    trainer = make_trainer(tiny, optimizer={"lr": 1e-2, "distributed": True})
    trainer.save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 2}))
    with pytest.raises(CheckpointError, match=r"world_size=2.*unless the optimiser is distributed"):
        trainer.load(tmp_path / "saved")


def test_boxes_meet_and_are_translated():
    assert _intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert _intersect(((0, 4),), ((4, 8),)) is None
    place = Placement("x", (9, 6), ((3, 9), (0, 3)), "p", ((10, 16), (0, 3)))
    assert _within(((3, 4), (2, 3)), place) == (slice(10, 11), slice(2, 3))
