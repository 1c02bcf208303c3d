"""A checkpoint read in another layout goes on as one rank would have, uninterrupted."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from vime_megatron import sft_loss
from vime_megatron.checkpoint.pieces import intersect, range_boxes, tensor_pieces
from vime_megatron.families.mapping import Placement

OPTIMIZER = {"lr": 0.3, "eps": 1.0, "clip_grad": 0.5, "weight_decay": 0.1}
SHARDED = {"optimizer": OPTIMIZER | {"distributed": True}}
WHOLE = {"optimizer": OPTIMIZER}
ONE = (1, WHOLE, {})
TENSOR = (2, WHOLE, {"tensor_parallel": 2})
PIPELINE = (2, WHOLE, {"pipeline_parallel": 2})
EXPERT = (2, WHOLE, {"expert_parallel": 2})
DATA_SHARDED = (2, SHARDED, {})
EXPERT_SHARDED = (2, SHARDED, {"expert_parallel": 2})
PIPELINE_SHARDED = (4, SHARDED, {"pipeline_parallel": 2})


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        ("qwen2-tied", TENSOR, ONE),
        ("qwen3-moe", EXPERT_SHARDED, TENSOR),
        ("qwen3-tied", PIPELINE_SHARDED, DATA_SHARDED),
        ("qwen3-moe", ONE, EXPERT_SHARDED),
    ],
    ids=["tensor-one", "expert-sharded-tensor", "pipeline-sharded-data-sharded", "one-expert-sharded"],
)
def test_training_goes_on_in_another_layout(ranks, model_of, reference_of, tmp_path, kind, written, read):
    model = {"model": str(model_of(kind))}
    whole = reference_of(kind)
    world, optimizer, settings = written
    first = ranks("train", world, settings=settings, save=str(tmp_path / "saved"), **optimizer, **model)
    world, optimizer, settings = read
    load, export = str(tmp_path / "saved"), str(tmp_path / "hf")
    second = ranks("train", world, settings=settings, load=load, export=export, **optimizer, **model)
    losses = first[0]["loss"] + second[0]["loss"]
    assert losses == pytest.approx(whole["loss"], rel=1e-5)
    norms = first[0]["grad_norm"] + second[0]["grad_norm"]
    assert norms == pytest.approx(whole["grad_norm"], rel=1e-4)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert whole["export"].keys() == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, whole["export"][name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def reference_of(ranks, model_of, tmp_path_factory):
    """One rank's four steps on a model, without a break."""
    made = {}

    def get(kind: str):
        if kind not in made:
            export = tmp_path_factory.mktemp("whole") / "hf"
            [made[kind]] = ranks(
                "train", 1, settings={}, steps=4, export=str(export), model=str(model_of(kind)), **WHOLE
            )
            made[kind]["export"] = load_file(export / "model.safetensors")
        return made[kind]

    return get


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_boxes_carry_every_bit(make_trainer, model_of, batch, tmp_path, dtype, sharded):
    """One rank's checkpoint, read by the other kind of optimiser: what differs is random states alone."""
    settings = {"dtype": dtype, "optimizer": {"lr": 1e-2, "distributed": sharded}}
    trainer = make_trainer(model_of("qwen3-moe"), **settings)
    trainer.step(batch, sft_loss)
    trainer.save(tmp_path / "saved")
    wanted = [trainer.step(batch, sft_loss).loss for _ in range(2)]
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["layout"]["distributed_optimizer"] is sharded
    assert manifest["optimizer"] == ["exp_avg", "exp_avg_sq", *(["param"] if dtype == "bfloat16" else [])]
    assert manifest["updates"] == 1
    other = {"dtype": dtype, "optimizer": {"lr": 1e-2, "distributed": not sharded}}
    again = make_trainer(model_of("qwen3-moe"), **other, seed=5)
    again.load(tmp_path / "saved")
    assert again.state.step == 1
    assert [again.step(batch, sft_loss).loss for _ in range(2)] == wanted


@given(st.integers(1, 7), st.integers(1, 6), st.data())
def test_a_range_of_a_matrix_is_at_most_three_boxes_that_tile_it(rows, width, data):
    start = data.draw(st.integers(0, rows * width))
    stop = data.draw(st.integers(start, rows * width))
    numbers = torch.arange(rows * width).view(rows, width)
    boxes = range_boxes((rows, width), start, stop)
    assert len(boxes) <= 3
    seen = []
    for ((top, bottom), (left, right)), offset in boxes:
        assert offset == len(seen)
        seen += numbers[top:bottom, left:right].flatten().tolist()
    assert seen == list(range(start, stop))
    assert range_boxes((rows * width,), start, stop) == ([(((start, stop),), 0)] if stop > start else [])


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.floats(0, 1), max_size=4))
def test_pieces_of_all_ranges_tile_the_tensors(rows, width, cuts):
    """However a parameter of two stacked tensors is cut into ranges, its pieces hold each element once."""
    shape = (2 * rows, width)
    wide = (rows, 2 * width)  # tensor parallelism holds the right half
    places = [
        Placement("a", wide, ((0, rows), (width, 2 * width)), "p", ((0, rows), (0, width))),
        Placement("b", wide, ((0, rows), (width, 2 * width)), "p", ((rows, 2 * rows), (0, width))),
    ]
    param = torch.arange(math.prod(shape)).view(shape)
    edges = sorted({0, param.numel(), *(int(cut * param.numel()) for cut in cuts)})
    tensors = {name: torch.full(wide, -1) for name in "ab"}
    for start, stop in pairwise(edges):
        shard = param.flatten()[start:stop].clone()
        for piece in tensor_pieces("", shard, shape, (start, stop), places):
            target = tensors[piece.key][tuple(slice(*bounds) for bounds in piece.box)]
            assert (target == -1).all()
            target.copy_(piece.data)
    assert torch.equal(torch.cat((tensors["a"], tensors["b"]))[:, width:], param)
    assert (torch.cat((tensors["a"], tensors["b"]))[:, :width] == -1).all()


def test_boxes_meet():
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 8),)) is None
