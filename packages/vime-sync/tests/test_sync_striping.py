"""Who serves which rows where several hold them: exact, balanced, local first; and the transaction over such parts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_alias import laid_out, let_go, on_memory
from sync_fake_engine import FakeControl, FakeModel, checkpoint, content_of
from vime_sync import DigestError, ManifestError, Publisher, SyncSession, WeightSource, merge_manifests
from vime_sync.manifest import check_manifest
from vime_sync.model import plan_model
from vime_sync.striping import Load, Place, Stripe, divide_rows, localised, striped
from vime_sync.transports.shm import ShmImporter

loads = st.lists(
    st.builds(
        Load,
        rows=st.integers(1, 60),
        row_bytes=st.integers(1, 400),
        holders=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=7, unique=True).map(tuple),
    ),
    max_size=12,
)


def served(asked, found):
    """Bytes by holder."""
    sums = {}
    for load, stripes in zip(asked, found, strict=True):
        for stripe in stripes:
            holder = load.holders[stripe.holder]
            sums[holder] = sums.get(holder, 0) + (stripe.end - stripe.begin) * load.row_bytes
    return sums


@settings(max_examples=300, deadline=None)
@given(asked=loads, grain=st.sampled_from([1, 100, 5000, 10**9]))
def test_every_row_is_served_exactly_once_by_one_of_its_holders(asked, grain):
    found = divide_rows(asked, grain=grain)
    for load, stripes in zip(asked, found, strict=True):
        assert [row for s in stripes for row in range(s.begin, s.end)] == list(range(load.rows))
        assert all(0 <= stripe.holder < len(load.holders) for stripe in stripes)
        assert len({stripe.holder for stripe in stripes}) == len(stripes)
        assert len(stripes) == 1 or load.rows * load.row_bytes >= grain
    assert found == divide_rows(asked, grain=grain)


@settings(max_examples=300, deadline=None)
@given(asked=loads.map(lambda found: [Load(x.rows, x.row_bytes, tuple("abc")) for x in found]))
def test_equal_holders_end_up_equally_busy(asked):
    """Up to what cannot be divided: a row, or a load that is one row."""
    sums = served(asked, divide_rows(asked, grain=1))
    busy = [sums.get(holder, 0) for holder in "abc"]
    assert max(busy) - min(busy) <= 2 * max((load.row_bytes for load in asked), default=0)


def test_seven_links_carry_a_seventh_each():
    (stripes,) = divide_rows([Load(7000, 1 << 10, tuple(range(7)))])
    assert stripes == [Stripe(1000 * n, 1000 * (n + 1), n) for n in range(7)]
    assert divide_rows([Load(10, 10, (0, 1))]) == [[Stripe(0, 10, 0)]]  # too little to divide


def test_what_has_no_choice_comes_first():
    found = divide_rows([Load(100, 10, ("a", "b")), Load(100, 10, ("a",))], grain=1)
    assert found == [[Stripe(0, 100, 1)], [Stripe(0, 100, 0)]]


# -- in a transaction -------------------------------------------------------------------------------------------------


@pytest.fixture
def replicas():
    """A function that makes ranks which hold the same weights, and their joint manifest; all are closed."""
    made = []

    def make(ranks, seed=1):
        publishers = [Publisher(WeightSource.from_tensors(checkpoint(seed), rank=rank)) for rank in range(ranks)]
        made.extend(publishers)
        return publishers, merge_manifests([publisher.manifest() for publisher in publishers])

    yield make
    for publisher in made:
        publisher.close(force=True)


@pytest.fixture
def remote(monkeypatch):
    """A function that says on which device each rank's buffers are, seen from a worker on device 0."""

    def set_places(device_of):
        def places(self):
            keys = [(int(s["rank"]), str(name)) for s in self._sources for name in s["buffers"]]
            return {key: Place(device_of(key[0]), device_of(key[0]) == 0) for key in keys}

        monkeypatch.setattr(ShmImporter, "places", places)
        monkeypatch.setattr("vime_sync.connection.striped", lambda p, t, w: striped(p, t, w, grain=1))

    return set_places


def test_a_manifest_keeps_the_other_holders(replicas):
    _, manifest = replicas(3)
    for tensor in check_manifest(manifest):
        (piece,) = tensor.pieces
        assert sorted([piece.region.rank, *(region.rank for region in piece.replicas)]) == [0, 1, 2]
    piece = manifest["tensors"][0]["pieces"][0]
    kept, piece["replicas"] = piece["replicas"], [{**piece["replicas"][0], "offset": 10**9}]
    with pytest.raises(ManifestError, match="does not fit its buffer"):
        check_manifest(manifest)
    piece["replicas"] = [{**kept[0], "start": [1, 0], "shape": [1, 8], "strides": [8, 1]}]
    with pytest.raises(ManifestError, match="another box"):
        check_manifest(manifest)
    piece["replicas"] = 3
    with pytest.raises(ManifestError, match="no list"):
        check_manifest(manifest)


def test_local_bytes_are_read_at_home_and_the_others_from_every_device(replicas):
    _, manifest = replicas(4)
    tensors = check_manifest(manifest)
    plan = plan_model(FakeModel(), tensors)
    keys = {(s["rank"], name) for s in manifest["sources"] for name in s["buffers"]}
    home = localised(plan, tensors, {key: Place(key[0] // 2, key[0] // 2 == 1) for key in keys})
    assert {copy.source.rank for copy in home.copies} == {2}  # ranks 2 and 3 are as near: always the same one
    away = {key: Place(1 + key[0] // 2, local=False) for key in keys}  # two devices, two ranks on each
    parts = striped(localised(plan, tensors, away), tensors, away, grain=1)
    sums = {1: 0, 2: 0}
    for copy, found in zip(plan.copies, parts, strict=True):
        assert [row for p in found for row in range(p.begin, p.end)] == list(range(copy.box.shape[0]))
        for part in found:
            sums[1 + part.source.rank // 2] += (part.end - part.begin) * copy.nbytes // copy.box.shape[0]
    assert abs(sums[1] - sums[2]) <= 2 * max(copy.nbytes // copy.box.shape[0] for copy in plan.copies)


@pytest.mark.parametrize("mode", ["shadow", "undo", "direct"])
@pytest.mark.parametrize("world", [1, 2])
def test_engines_read_from_all_replicas_and_serve_the_same_bytes(engines, replicas, remote, mode, world):
    remote(lambda rank: 1 + rank)
    publishers, manifest = replicas(3)
    engine = engines(world=world)
    for publisher in publishers:
        publisher.stage(1)
    with SyncSession([engine.url], manifest, deadline_s=20, mode=mode) as session:
        report = session.update(1)
        parts = [part for r in engine.control.receivers for found in r._link.parts for part in found]
        assert {part.source.rank for part in parts} == {0, 1, 2}
    assert engine.content() == content_of(1, world)
    assert report.digest == publishers[0].staged_digest


def test_a_replica_that_holds_other_bytes_is_found_out(engines, replicas, remote):
    remote(lambda rank: 1 + rank)
    publishers, manifest = replicas(2)
    for buffer in publishers[1].source.buffers.values():
        buffer.add_(1)
    for publisher in publishers:
        publisher.stage(1)
    engine = engines()
    with (
        SyncSession([engine.url], manifest, deadline_s=20, mode="shadow") as session,
        pytest.raises(DigestError, match="not those that were published"),
    ):
        session.update(1)


def test_each_engine_is_aliased_on_its_own_replica(engines, remote):
    """Data-parallel ranks, an engine beside each: the manifest spreads tensors over ranks, the engines do not."""
    publishers = [Publisher(laid_out(owner=rank)) for rank in range(2)]
    manifest = merge_manifests([publisher.manifest() for publisher in publishers])
    assert len({p["rank"] for tensor in manifest["tensors"] for p in tensor["pieces"]}) == 2
    for publisher in publishers:
        values = checkpoint(1)
        for tensor in publisher.source.tensors:
            for piece in tensor.pieces:
                publisher.source.view(piece.region).copy_(values[tensor.name])
        publisher.stage(1)
    controls = []
    for home in range(2):
        remote(lambda rank, home=home: 0 if rank == home else 1)
        controls.append(FakeControl([on_memory(FakeModel(), manifest)]))
        assert {region.rank for region in controls[-1].models[0].binding.regions.values()} == {home}
    pair = [engines(control=control) for control in controls]
    with SyncSession([engine.url for engine in pair], manifest, deadline_s=20) as session:
        assert session.versions() == [1, 1]
        with session.writing(2) as block:
            for publisher in publishers:
                with publisher.writing(2):
                    publisher.source.buffers["flat"].mul_(2)
        assert (block.report.mode, block.report.engines) == ("alias", 2)
    doubled = content_of(0, tensors={name: tensor * 2 for name, tensor in checkpoint(1).items()})
    assert [engine.content() for engine in pair] == [doubled, doubled]
    for control in controls:
        let_go(control)
    for publisher in publishers:
        publisher.close(force=True)
