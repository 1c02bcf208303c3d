"""However a checkpoint is cut over trainer ranks and laid out in their buffers, engines end with the same bytes."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_fake_engine import FakeModel, checkpoint, content_of
from vime_sync.copying import CopyProgram
from vime_sync.digest import Digest, digest_box, digest_tensor
from vime_sync.layout import Box, CheckpointTensor, Piece, Region, whole
from vime_sync.manifest import check_manifest, describe, merge_manifests
from vime_sync.model import plan_model
from vime_sync.source import WeightSource


def cut(box, dice, cuts):
    """Cut a box at random places, along random dimensions, into at most `cuts` + 1 boxes."""
    boxes = [box]
    for _ in range(cuts):
        target = boxes.pop(dice.randrange(len(boxes)))
        dim = dice.randrange(len(target.shape))
        at = dice.randint(0, target.shape[dim])
        if at in (0, target.shape[dim]):
            boxes.append(target)
            continue
        for start, extent in ((0, at), (at, target.shape[dim] - at)):
            starts, shape = list(target.start), list(target.shape)
            starts[dim], shape[dim] = starts[dim] + start, extent
            boxes.append(Box(tuple(starts), tuple(shape)))
    return boxes


def scatter(tensors, ranks, dice, cuts):
    """Sources of several ranks: random boxes, at random offsets, with gaps, rows padded; some held twice."""
    flats = [torch.full((0,), float("nan")) for _ in range(ranks)]
    described = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        for box in cut(whole(tuple(tensor.shape)), dice, dice.randint(0, cuts)):
            part = tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
            holders = dice.sample(range(ranks), dice.randint(1, min(2, ranks)))
            for rank in holders:
                row = box.shape[-1] + dice.randint(0, 3)
                rows = part.numel() // box.shape[-1]
                block = torch.full((rows, row), float("nan"))
                block[:, : box.shape[-1]] = part.reshape(rows, -1)
                offset = flats[rank].numel() + dice.randint(0, 5)
                gap = torch.full((offset - flats[rank].numel(),), float("nan"))
                flats[rank] = torch.cat([flats[rank], gap, block.flatten()])
                strides = (row, 1) if len(box.shape) == 2 else (1,)
                piece = Piece(box, Region(rank, "flat", offset, box.shape, strides))
                described[rank].setdefault(name, []).append(piece)
    sources = []
    for rank in range(ranks):
        held = [
            CheckpointTensor(n, tuple(tensors[n].shape), tensors[n].dtype, tuple(p)) for n, p in described[rank].items()
        ]
        sources.append(WeightSource.from_regions({"flat": flats[rank]}, held, rank=rank))
    return sources


def manifests_of(sources):
    made = []
    for source in sources:
        buffers = {"flat": {"dtype": "float32", "numel": source.buffers["flat"].numel(), "handle": {}}}
        record = {"publisher": "p", "control": {"segment": "vime-x", "pieces": 0}, "buffers": buffers}
        made.append(describe(source, transport="shm", publisher=record))
    return made


cases = {"seed": st.integers(0, 10**6), "ranks": st.integers(1, 4), "cuts": st.integers(0, 4)}


@settings(max_examples=20, deadline=None)
@given(world=st.sampled_from([1, 2]), **cases)
def test_any_split_over_ranks_covers_any_engine_exactly(seed, ranks, cuts, world):
    dice, tensors = random.Random(seed), checkpoint(seed % 7)
    sources = scatter(tensors, ranks, dice, cuts)
    merged = merge_manifests(manifests_of(sources))
    buffers = {(source.rank, "flat"): source.buffers["flat"] for source in sources}
    for rank, expected in enumerate(content_of(0, world, tensors=tensors)):
        model = FakeModel(rank, world, seed=99)
        plan = plan_model(model, check_manifest(merged))
        CopyProgram(plan, buffers, {name: model.live()[name] for name in plan.live_names}).run(digest="off", phase=0)
        assert model.content() == expected


@settings(max_examples=30, deadline=None)
@given(**cases)
def test_the_digest_does_not_depend_on_the_split(seed, ranks, cuts):
    dice, tensors = (
        random.Random(seed),
        {"w": checkpoint(1)["layers.0.o_proj.weight"], "v": checkpoint(1)["norm.weight"]},
    )
    total = Digest()
    for source in scatter(tensors, 1, dice, cuts):
        for tensor in source.tensors:
            for piece in tensor.pieces:
                view = source.view(piece.region)
                total += Digest.from_tensor(digest_box(view, piece.box, tensor.shape, tensor.name))
    assert total == digest_tensor(tensors["w"], "w") + digest_tensor(tensors["v"], "v")


@settings(max_examples=30, deadline=None)
@given(**cases)
def test_manifests_join_in_any_order(seed, ranks, cuts):
    dice = random.Random(seed)
    manifests = manifests_of(scatter(checkpoint(1), ranks, dice, cuts))
    first = merge_manifests(manifests)
    dice.shuffle(manifests)
    assert merge_manifests(manifests) == first
