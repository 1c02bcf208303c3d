"""The geometry on which plans stand: any view a loader can make is boxes, and boxes enumerate the same elements."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_sync.digest import Digest, digest_box, digest_tensor
from vime_sync.errors import ManifestError
from vime_sync.layout import Box, boxes_of, whole
from vime_sync.manifest import check_manifest, merge_manifests
from vime_sync.publisher import Publisher
from vime_sync.source import WeightSource

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def sliced(draw):
    """A contiguous tensor of its own flat indexes and a view that slicing and reshaping made of it."""
    shape = draw(shapes)
    base = torch.arange(math.prod(shape)).view(shape)
    view = base
    for dim, extent in enumerate(shape):
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        step = draw(st.integers(1, 2))
        view = view[(slice(None),) * dim + (slice(start, stop, step),)]
    if draw(st.booleans()) and view.is_contiguous():
        view = view.reshape(-1)
    return shape, base, view


@settings(max_examples=200, deadline=None)
@given(sliced())
def test_boxes_enumerate_the_view(case):
    shape, base, view = case
    seen = torch.full(tuple(view.shape), -1)
    for part, box in boxes_of(view.storage_offset(), tuple(view.shape), tuple(view.stride()), shape):
        at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        to = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
        seen[to] = base[at].reshape(part.shape)
    assert torch.equal(seen, view)


def test_a_transposed_view_is_refused():
    with pytest.raises(ValueError, match="row-major order"):
        list(boxes_of(0, (3, 2), (1, 3), (2, 3)))


@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    seed=st.integers(0, 9),
    cut=st.integers(0, 100),
    dtype=st.sampled_from(["bfloat16", "float32", "int64"]),
)
def test_digest_adds_up_over_any_cut(shape, seed, cut, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).mul(100).to(getattr(torch, dtype))
    at = cut % (shape[0] + 1)
    parts = [Box((0,) * len(shape), (at, *shape[1:])), Box((at, *(0,) * (len(shape) - 1)), (shape[0] - at, *shape[1:]))]
    halves = [Digest.from_tensor(digest_box(x[b.start[0] : b.start[0] + b.shape[0]], b, shape, "w")) for b in parts]
    assert halves[0] + halves[1] == digest_tensor(x, "w")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 6), columns=st.sampled_from([3, 4, 8, 16]), cut=st.integers(1, 15))
def test_digest_of_words_equals_digest_of_elements(rows, columns, cut):
    x = torch.randn(rows, columns).to(torch.bfloat16)
    padded = torch.zeros(rows, columns + 1, dtype=torch.bfloat16)
    padded[:, :columns] = x
    at = min(cut, columns)
    left = digest_box(padded[:, :at], Box((0, 0), (rows, at)), (rows, columns), "w")
    right = digest_box(padded[:, at:columns], Box((0, at), (rows, columns - at)), (rows, columns), "w")
    assert Digest.from_tensor(left + right) == digest_tensor(x, "w")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_digest_sees_what_changes(dtype):
    x = (torch.arange(48).view(6, 8) % 7).to(dtype)
    swapped = x[[1, 0, 2, 3, 4, 5]]
    touched = x.clone()
    touched[5, 7] += 1
    values = {digest_tensor(x, "w"), digest_tensor(swapped, "w"), digest_tensor(touched, "w"), digest_tensor(x, "v")}
    assert len(values) == 4
    assert Digest.parse(str(digest_tensor(x, "w"))) == digest_tensor(x, "w")


def test_digest_is_linear_in_the_bytes():
    """A delta proves itself: old + digest(new bytes - old bytes, where they differ) = new."""
    old, new = torch.arange(64, dtype=torch.int32).view(8, 8), torch.arange(64, dtype=torch.int32).view(8, 8).clone()
    new[3, 2] = 900
    box = Box((3, 2), (1, 1))
    gone, come = (Digest.from_tensor(digest_box(t[3:4, 2:3], box, (8, 8), "w")) for t in (old, new))
    moved = Digest((come.first - gone.first) % 2**64, (come.second - gone.second) % 2**64)
    assert digest_tensor(old, "w") + moved == digest_tensor(new, "w")


def test_sampled_digest_looks_at_other_blocks_for_other_phases():
    x = torch.randn(1 << 16)
    sums = {digest_tensor(x, "w", mode="sampled", phase=p) for p in range(16)}
    assert len(sums) == 16
    assert sum(sums, Digest()) == digest_tensor(x, "w")


def shards(kind):
    """Two ranks that hold a [4, 6] tensor by rows, by columns, or both whole."""
    full = torch.arange(24, dtype=torch.float32).view(4, 6)
    cuts = {
        "rows": [(full[:2], (0, 0)), (full[2:], (2, 0))],
        "columns": [(full[:, :3], (0, 0)), (full[:, 3:], (0, 3))],
        "replicas": [(full, (0, 0)), (full, (0, 0))],
    }[kind]
    from vime_sync.layout import CheckpointTensor, Piece, Region

    made = []
    for rank, (part, start) in enumerate(cuts):
        flat = part.reshape(-1).clone()
        region = Region(rank, "flat", 0, tuple(part.shape), (part.shape[1], 1))
        tensor = CheckpointTensor("w", (4, 6), torch.float32, (Piece(Box(start, tuple(part.shape)), region),))
        made.append(WeightSource.from_regions({"flat": flat}, [tensor], rank=rank))
    return made


@pytest.mark.parametrize("kind", ["rows", "columns", "replicas"])
def test_manifests_of_ranks_join(kind):
    publishers = [Publisher(source) for source in shards(kind)]
    try:
        (tensor,) = check_manifest(merge_manifests([p.manifest() for p in publishers]))
        assert sum(piece.box.volume for piece in tensor.pieces) == 24
        assert len(tensor.pieces) == (1 if kind == "replicas" else 2)
    finally:
        for publisher in publishers:
            publisher.close()


def test_a_hole_an_overlap_and_a_double_rank_are_named():
    publishers = [Publisher(source) for source in shards("rows")]
    try:
        first, second = (p.manifest() for p in publishers)
        with pytest.raises(ManifestError, match="hole"):
            merge_manifests([first])
        with pytest.raises(ManifestError, match="published twice"):
            merge_manifests([first, first])
        second["tensors"][0]["pieces"][0]["start"] = [1, 0]
        with pytest.raises(ManifestError, match="overlap"):
            merge_manifests([first, second])
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.parametrize(
    "broken", [None, [], {"format": 9}, {"format": 1, "transport": "shm", "sources": [3], "tensors": []}]
)
def test_garbage_is_a_manifest_error(broken):
    with pytest.raises(ManifestError):
        check_manifest(broken)


def test_a_region_outside_its_buffer_is_refused():
    from vime_sync.layout import CheckpointTensor, Piece, Region

    piece = Piece(whole((4,)), Region(0, "flat", 2, (4,), (1,)))
    with pytest.raises(ManifestError, match="outside its buffer"):
        WeightSource.from_regions({"flat": torch.zeros(5)}, [CheckpointTensor("w", (4,), torch.float32, (piece,))])
