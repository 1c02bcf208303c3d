"""One conformance suite that every transport passes, and what each promises beside it.

GPU transports run the same cases in test_sync_gpu.py, where there is a GPU.
"""

import json
import os
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_fake_engine import checkpoint, content_of
from vime_sync import DigestError, StaleSourceError, SyncSession, TransportError, WeightSource, merge_manifests
from vime_sync.copying import CopyProgram
from vime_sync.publisher import Publisher
from vime_sync.transports import EXPORTERS, collective, make_exporter, make_importer, open_control

CPU = ["shm", "disk", "delta", "collective"]


@pytest.fixture
def options(tmp_path):
    """What each transport needs to know."""
    return {"disk": {"folder": tmp_path}, "delta": {"folder": tmp_path}, "collective": {"deadline_s": 20.0}}


def test_every_transport_is_in_this_suite_or_needs_a_gpu():
    assert set(EXPORTERS) == {*CPU, "ipc"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CPU)
def test_what_is_published_is_served_bit_for_bit(engines, trainers, options, name, world, dtype):
    engine = engines(world=world, dtype=dtype)
    trainer = trainers(checkpoint(1, dtype), name, options=options.get(name))
    session = trainer.session(engine)
    for version, seed in ((1, 1), (2, 2), (3, 2), (7, 3)):
        trainer.load(checkpoint(seed, dtype))
        trainer.publisher.stage(version)
        report = session.update(version)
        assert engine.content() == content_of(seed, world, dtype)
        assert (report.transport, report.digest_mode) == (name, "full")


@pytest.mark.parametrize("name", CPU)
def test_two_engines_read_from_one_trainer(engines, trainers, options, name):
    pair = engines(), engines(world=2)
    trainer = trainers(checkpoint(4), name, options=options.get(name))
    trainer.publisher.stage(1)
    trainer.session(*pair).update(1)
    assert [engine.content() for engine in pair] == [content_of(4), content_of(4, 2)]


@pytest.mark.parametrize("name", CPU)
def test_a_version_that_is_not_staged_is_refused(engines, trainers, options, name):
    engine, trainer = engines(), trainers(checkpoint(1), name, options=options.get(name))
    before = engine.content()
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    with pytest.raises(StaleSourceError, match=r"another version|not on the disk"):
        session.update(2)
    assert engine.content() == before
    session.update(1)
    assert engine.content() == content_of(1)


@pytest.mark.parametrize("name", CPU)
def test_a_trainer_that_is_gone_is_named_and_an_engine_serves_on(engines, trainers, options, name):
    engine, trainer = engines(), trainers(checkpoint(1), name, options=options.get(name))
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    session.update(1)
    trainer.publisher.close()
    with pytest.raises(StaleSourceError):
        session.update(2)
    assert engine.content() == content_of(1)


@pytest.mark.parametrize("name", ["shm", "collective"])
def test_a_trainer_that_writes_too_early_is_found_out(engines, trainers, options, name):
    engine, trainer = engines(), trainers(checkpoint(1), name, options=options.get(name))
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    trainer.publisher._control.begin()
    with pytest.raises(StaleSourceError, match="middle of a write"):
        session.update(1)
    trainer.publisher.stage(2)
    session.update(2)


@pytest.mark.parametrize("name", CPU)
def test_wrong_options_are_named(name):
    source = WeightSource.from_tensors(checkpoint(1))
    with pytest.raises(TransportError, match="wrong options"):
        make_exporter(name, source, {"colour": "red"})
    with pytest.raises(TransportError, match="unknown transport"):
        make_exporter("pigeon", source)


def folder_of(trainer, version):
    return trainer.publisher._exporter._folder / "rank-00000" / f"{version:010d}"


@pytest.mark.parametrize("name", ["disk", "delta"])
def test_a_full_disk_leaves_the_versions_before(engines, trainers, options, name):
    engine, trainer = engines(), trainers(checkpoint(1), name, options=options[name])
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    session.update(1)
    trainer.load(checkpoint(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # no file may grow beyond 64 bytes: writes fail for real
    try:
        with pytest.raises(TransportError, match="could not be written"):
            trainer.publisher.stage(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in folder_of(trainer, 1).parent.iterdir()) == [f"{1:010d}"]
    with pytest.raises(StaleSourceError):
        session.update(2)
    assert engine.content() == content_of(1)
    trainer.publisher.stage(3)
    session.update(3)
    assert engine.content() == content_of(2)


@pytest.mark.parametrize("name", ["disk", "delta"])
def test_damaged_files_are_named_and_nothing_is_served_of_them(engines, trainers, options, name):
    engine, trainer = engines(), trainers(checkpoint(1), name, options=options[name])
    session = trainer.session(engine)
    for version in (1, 2):
        trainer.load(checkpoint(version))
        trainer.publisher.stage(version)
        if version == 1:
            session.update(1)
    file = next(p for p in folder_of(trainer, 2).iterdir() if p.suffix in (".safetensors", ".zst"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TransportError, match="cannot be read"):
        session.update(2)
    assert engine.content() == content_of(1)
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises((TransportError, DigestError)):
        session.update(2)
    assert engine.content() == content_of(1)
    file.write_bytes(whole)
    session.update(2)
    assert engine.content() == content_of(2)


def test_old_versions_are_removed(trainers, options):
    trainer = trainers(checkpoint(1), "disk", options=options["disk"] | {"keep": 2})
    for version in range(1, 6):
        trainer.publisher.stage(version)
    assert sorted(p.name for p in folder_of(trainer, 1).parent.iterdir()) == [f"{v:010d}" for v in (4, 5)]


def test_deltas_are_kept_from_the_last_whole_version_but_one(trainers, options):
    trainer = trainers(checkpoint(1), "delta", options=options["delta"] | {"full_every": 2})
    for version in range(1, 7):
        trainer.publisher.stage(version)
    assert sorted(p.name for p in folder_of(trainer, 1).parent.iterdir()) == [f"{v:010d}" for v in (3, 4, 5, 6)]


def test_a_version_is_on_the_disk_before_it_has_its_name(trainers, options, monkeypatch):
    trainer, flushed, real = trainers(checkpoint(1), "disk", options=options["disk"]), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(Path(f"/proc/self/fd/{fd}").readlink()), real(fd)))
    trainer.publisher.stage(1)
    folder = folder_of(trainer, 1)
    partial = folder.with_name(f".{folder.name}.partial")
    assert set(flushed) == {partial / "buffers.safetensors", partial / "control.json", partial, folder.parent}
    assert flushed[-2:] == [partial, folder.parent]  # what it holds, then it, then its name


def test_a_delta_that_would_be_its_own_base_is_refused(engines, trainers, options):
    trainer, engine = trainers(checkpoint(1), "delta", options=options["delta"]), engines()
    for version in (1, 2):
        trainer.publisher.stage(version)
    header = folder_of(trainer, 2) / "delta.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"base": 2}))
    with pytest.raises(TransportError, match="malformed delta"):
        trainer.session(engine).update(2)


def changed(tensors, share, seed):
    """New values for a share of the elements, as a step in bf16 leaves them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.where(torch.rand(t.shape, generator=generator) < share, torch.randn(t.shape, generator=generator), t)
        for n, t in tensors.items()
    }


def test_a_delta_moves_only_what_changed_and_an_engine_may_skip_versions(engines, trainers, options):
    tensors = checkpoint(1)
    trainer = trainers(tensors, "delta", options=options["delta"] | {"full_every": 100})
    near, far = engines(), engines()
    first, second = trainer.session(near), trainer.session(far)
    for version in range(1, 6):
        tensors = changed(tensors, 0.03, version)
        trainer.load(tensors)
        trainer.publisher.stage(version)
        first.update(version)
    second.update(5)
    assert near.content() == far.content() == content_of(0, tensors=tensors)
    whole = (folder_of(trainer, 1) / "buffers.safetensors").stat().st_size
    sizes = [(folder_of(trainer, v) / "delta.zst").stat().st_size for v in range(2, 6)]
    assert max(sizes) < whole / 5
    assert json.loads((folder_of(trainer, 5) / "delta.json").read_text())["base"] == 4


def test_a_missing_base_is_named_and_a_later_whole_version_heals(engines, trainers, options):
    import shutil

    tensors = checkpoint(1)
    trainer = trainers(tensors, "delta", options=options["delta"] | {"full_every": 4})
    engine = engines()
    session = trainer.session(engine)
    for version in (1, 2, 3):
        tensors = changed(tensors, 0.1, version)
        trainer.load(tensors)
        trainer.publisher.stage(version)
    shutil.rmtree(folder_of(trainer, 2))
    before = engine.content()
    with pytest.raises(StaleSourceError, match="base version is missing"):
        session.update(3)
    assert engine.content() == before
    for version in (4, 5):
        trainer.publisher.stage(version)
    session.update(5)
    assert engine.content() == content_of(0, tensors=tensors)


dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8])


@settings(max_examples=15, deadline=None)
@given(numel=st.integers(1, 300), share=st.floats(0, 1), dtype=dtypes, seed=st.integers(0, 99))
def test_a_delta_rebuilds_any_content_and_applying_it_twice_is_the_same(tmp_path_factory, numel, share, dtype, seed):
    torch.manual_seed(seed)
    data = (torch.randn(numel) * 100).to(dtype)
    options = {"folder": tmp_path_factory.mktemp("delta")}
    with Publisher(WeightSource.from_tensors({"w": data}), "delta", options=options) as publisher:
        publisher.stage(1)
        importer = make_importer(
            "delta", publisher.manifest()["sources"], {(0, n) for n in publisher.source.buffers}, data.device
        )
        (buffer,) = importer.open().values()
        importer.fetch(1)
        mask = torch.rand(numel) < share
        data[mask] = (torch.randn(numel) * 100).to(dtype)[mask]
        if dtype.is_floating_point:
            data[0] = float("nan")
        publisher.stage(2)
        for _ in range(2):
            importer.fetch(2)
            assert torch.equal(buffer.view(torch.uint8), data.view(torch.uint8))
            importer._held = {0: 1}  # as if the first application had been forgotten
        importer.close()


def test_collective_deadline_names_the_rank(trainers):
    trainer = trainers(checkpoint(1), "collective", options={"deadline_s": 60.0})
    trainer.publisher.stage(1)
    manifest = trainer.publisher.manifest()
    needed = {(0, name) for name in trainer.publisher.source.buffers}
    importer = make_importer("collective", manifest["sources"], needed, torch.device("cpu"))
    importer.open()
    control = open_control(importer, manifest["sources"][0])
    assert control.check(1, where="rank 0") % 2 == 0
    trainer.publisher._exporter._closing.set()  # the trainer's thread stops answering
    trainer.publisher._exporter._thread.join(10)
    importer._links[0].deadline = timedelta(seconds=1.0)  # only now: a busy machine may need more to come so far
    started = time.monotonic()
    with pytest.raises(StaleSourceError, match=r"trainer rank 0.*within 1\.0 s"):
        importer.fetch(1)
    assert time.monotonic() - started < 50


def test_collective_goes_on_after_requests_that_nobody_can_answer(engines, trainers):
    """Of a worker that was given up, who asks once more, or of somebody else who found the port."""
    trainer, engine = trainers(checkpoint(1), "collective", options={"deadline_s": 20.0}), engines()
    store = trainer.publisher._exporter._store
    for request in ("99 0", "99 control", "nonsense", "x y"):
        store.set(f"request-{store.add('requests', 1)}", request)
    trainer.publisher.stage(1)
    trainer.session(engine).update(1)
    assert engine.content() == content_of(1)


def test_a_rank_that_answered_is_let_go_when_another_does_not(engines):
    held = list(checkpoint(1).items())
    options = {"deadline_s": 20.0}
    ranks = [WeightSource.from_tensors(dict(held[rank::2]), rank=rank) for rank in range(2)]
    publishers = [Publisher(source, "collective", options=options) for source in ranks]
    manifest = merge_manifests([publisher.manifest() for publisher in publishers])
    for record in manifest["sources"][1]["buffers"].values():
        record["handle"]["token"] = "of a trainer that was here before"
    exporter = publishers[0]._exporter
    with (
        pytest.raises(StaleSourceError, match="another trainer"),
        SyncSession([engines().url], manifest, deadline_s=20),
    ):
        pytest.fail("the block must not begin")
    end = time.monotonic() + 20
    while exporter._store.add("requests", 0) < 2 or exporter._groups:  # it joined, and it left
        assert time.monotonic() < end
        time.sleep(0.01)
    for publisher in publishers:
        publisher.close()


def test_an_engine_has_one_link_to_a_trainer_and_none_after_its_session(engines, trainers):
    trainer, engine = trainers(checkpoint(1), "collective", options={"deadline_s": 20.0}), engines()
    session, exporter = trainer.session(engine), trainer.publisher._exporter

    def members(expected):
        end = time.monotonic() + 20
        while set(exporter._groups) != expected:
            assert time.monotonic() < end, exporter._groups
            time.sleep(0.01)

    session.connect()
    members({1})
    session.connect()
    members({2})
    session.close()
    members(set())


@pytest.mark.parametrize("rank", [0, 1])
def test_whichever_rank_writes_too_early_is_found_out_without_digests(engines, monkeypatch, rank):
    held, real = list(checkpoint(1).items()), CopyProgram.sums
    sources = [WeightSource.from_tensors(dict(held[r::2]), rank=r) for r in range(2)]
    engine, publishers = engines(), [Publisher(source, digest="off") for source in sources]
    before = engine.content()

    def late(program, **how):
        found = real(program, **how)
        publishers[rank]._control.begin()
        return found

    monkeypatch.setattr(CopyProgram, "sums", late)
    for publisher in publishers:
        publisher.stage(1)
    with SyncSession([engine.url], merge_manifests([p.manifest() for p in publishers]), deadline_s=20) as session:
        with pytest.raises(StaleSourceError, match=f"wrote while an engine was reading .*trainer rank {rank}"):
            session.update(1)
        assert engine.content() == before
    for publisher in publishers:
        publisher.close()


class Transfer:
    """What a device says of a transfer: done after so many questions, or never."""

    def __init__(self, questions):
        self.left, self.waited, self.aborted = questions, False, False

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self):
        self.waited = True

    def abort(self):
        self.aborted = True


def test_a_device_transfer_that_hangs_is_given_up_and_its_group_aborted():
    done, hangs = Transfer(3), Transfer(10**9)
    collective._wait(done, done, torch.device("cuda", 0), timedelta(seconds=60))
    assert (done.waited, done.aborted) == (True, False)
    with pytest.raises(RuntimeError, match=r"within 0\.05 s; the group was aborted"):
        collective._wait(hangs, hangs, torch.device("cuda", 0), timedelta(seconds=0.05))
    assert (hangs.waited, hangs.aborted) == (False, True)


def test_a_replaced_trainer_at_the_same_address_is_noticed(trainers):
    first = trainers(checkpoint(1), "collective")
    manifest = first.publisher.manifest()
    for record in manifest["sources"][0]["buffers"].values():
        record["handle"]["token"] = "of a trainer that was here before"
    needed = {(0, name) for name in first.publisher.source.buffers}
    importer = make_importer("collective", manifest["sources"], needed, torch.device("cpu"))
    with pytest.raises(StaleSourceError, match="another trainer"):
        importer.open()


@pytest.mark.parametrize("name", ["disk", "delta", "collective"])
def test_only_mapped_memory_can_be_aliased(trainers, options, name):
    from vime_sync import AliasError
    from vime_sync.bench import BenchModel, make_source, shape_of_size

    shape = shape_of_size(1)
    source = make_source(shape, torch.device("cpu"), torch.bfloat16, shared=False)
    with Publisher(source, name, options=options[name]) as publisher:
        model = BenchModel(shape, torch.device("cpu"), torch.bfloat16)
        with pytest.raises(AliasError, match="maps no memory"):
            model.bound(publisher.manifest())


def test_shared_memory_can_be_given_up_by_a_process_that_runs_no_exit_handlers():
    from vime_sync import release_shared, shared_empty
    from vime_sync.control import SHM, segment_name

    mine = segment_name().rpartition("-")[0] + "-*"  # other processes make theirs meanwhile
    before = {path.name for path in SHM.glob(mine)}
    tensor = shared_empty(16, torch.float32).fill_(3.0)
    (made,) = {path.name for path in SHM.glob(mine)} - before
    release_shared()
    assert not (SHM / made).exists()
    assert tensor.sum() == 48, "what holds it goes on"
