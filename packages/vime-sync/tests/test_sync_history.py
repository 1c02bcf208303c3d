"""Faults that other weight syncs have had in public, each as a test that this one does not have it.

The reference after each name is to the project's own tracker. What needs a GPU is in test_sync_gpu.py; what other
files prove already is not repeated (double start, sleeping, unpaused, caches: test_sync_transaction.py).
"""

import gc

import pytest
import torch
from sync_fake_engine import FakeModel, checkpoint, content_of
from vime_sync import IncompletePlanError, StaleSourceError, UnplannableError, VersionConflictError, WeightSource
from vime_sync.control import Segment
from vime_sync.publisher import Publisher


def ready(trainers, tensors, version=1, *arguments, **options):
    trainer = trainers(tensors, *arguments, **options)
    trainer.publisher.stage(version)
    return trainer


@pytest.mark.parametrize("mode", ["shadow", "undo", "direct"])
def test_updates_strand_no_memory(engines, trainers, mode):
    """vllm#52950: about 2 GiB more after every update."""
    engine, trainer = engines(), ready(trainers, checkpoint(1))
    session = trainer.session(engine, mode=mode)
    session.update(1)

    def held():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)

    before = held()
    for version in range(2, 6):
        trainer.publisher.stage(version)
        session.update(version)
    assert held() <= before + 64


def test_strided_sources_arrive_in_order(engines):
    """vllm#57130: non-contiguous tensors were sent as raw memory."""
    engine = engines()
    tensors = {n: (t.t().contiguous().t() if t.dim() == 2 else t) for n, t in checkpoint(3).items()}
    assert not tensors["layers.0.o_proj.weight"].is_contiguous()
    with Publisher(WeightSource.from_tensors(tensors)) as publisher:
        publisher.stage(1)
        from vime_sync import SyncSession

        with SyncSession([engine.url], publisher.manifest(), deadline_s=20) as session:
            session.update(1)
    assert engine.content() == content_of(3)


def test_every_update_reads_the_weights_again(engines, trainers):
    """vllm#32718: a cached iterator served the first weights for ever."""
    engine, trainer = engines(), trainers(checkpoint(1))
    session = trainer.session(engine)
    for version in range(1, 5):
        trainer.load(checkpoint(version))
        trainer.publisher.stage(version)
        session.update(version)
        assert engine.content() == content_of(version)


def test_live_storage_never_moves(engines, trainers):
    """vllm#50521, #48438, #48539, #41670: captured graphs read storage that a reload had replaced."""
    engine, trainer = engines(world=2), ready(trainers, checkpoint(1))
    addresses = [{n: t.data_ptr() for n, t in m.live().items()} for m in engine.control.models]
    session = trainer.session(engine)
    for version in (1, 2, 3):
        trainer.publisher.stage(version)
        session.update(version)
    assert addresses == [{n: t.data_ptr() for n, t in m.live().items()} for m in engine.control.models]


def test_the_same_weights_twice_are_the_same_bytes(engines, trainers):
    """vllm#42595, #40390: a layout step that is not idempotent, applied again on every sync."""
    engine, trainer = engines(), ready(trainers, checkpoint(1))
    session = trainer.session(engine)
    digests = []
    for version in (1, 2, 3):
        trainer.publisher.stage(version)
        digests.append(session.update(version).digest)
    assert len(set(digests)) == 1
    assert engine.content() == content_of(1)


@pytest.mark.parametrize("world", [1, 2])
def test_no_byte_stays_uninitialised(engines, trainers, world):
    """prime-rl#2714, vllm#48284: one dropped load left NaN in a live tensor, seen only much later."""
    engine, trainer = engines(world=world), ready(trainers, checkpoint(1))
    for model in engine.control.models:
        for tensor in model.parameters.values():
            tensor.fill_(float("nan"))
    trainer.session(engine).update(1)
    assert engine.content() == content_of(1, world)
    assert not any(t.isnan().any() for model in engine.control.models for t in model.parameters.values())


def test_a_layer_that_is_only_partly_sent_is_refused(engines, trainers):
    """vLLM processes partly loaded layers anyway; here the plan is incomplete, and it says what is missing."""
    trainer = ready(trainers, checkpoint(1, drop=["layers.0.experts.0.up_proj.weight"]))
    with pytest.raises(IncompletePlanError, match=r"partly written.*layers\.0\.experts\.w13"):
        trainer.session(engines()).update(1)


def test_nothing_is_written_before_every_engine_is_paused(engines, trainers):
    """prime-rl#2326: some ranks wrote while engines were still generating."""
    engine, trainer = engines(world=2), ready(trainers, checkpoint(1))
    before, seen = engine.content(), []

    async def watch(message, deadline):
        if message["op"] in ("stage", "commit"):
            seen.append((message["op"], engine.control.paused, engine.content() == before))

    engine.control.hook = watch
    trainer.session(engine).update(1)
    assert seen == [("stage", False, True), ("commit", True, True)]


class Absorbed(FakeModel):
    """A model that derives a matrix from two others while loading, as absorbed MLA projections are."""

    def _load(self, name, tensor):
        if name.endswith("o_proj.weight"):
            self.parameters[name].copy_(tensor * 2)
        else:
            super()._load(name, tensor)


def test_derived_weights_are_refused_by_name(engines, trainers):
    """prime-rl#2467: absorbed matrices kept their old values."""
    from sync_fake_engine import FakeControl

    engine = engines(control=FakeControl([Absorbed()]))
    with pytest.raises(UnplannableError, match=r"o_proj.*mul"):
        ready(trainers, checkpoint(1)).session(engine).update(1)


def test_a_shared_buffer_is_opened_once(engines, monkeypatch):
    """sglang#17870: the same handle opened twice hung; vime#175: 19,500 opens per sync."""
    flat = torch.cat([t.reshape(-1) for t in checkpoint(1).values()])
    tensors, at = {}, 0
    for name, tensor in checkpoint(1).items():
        tensors[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    engine, opened, real = engines(), [], Segment.__init__

    def count(self, name, size, *, create):
        if not create:
            opened.append(name)
        real(self, name, size, create=create)

    with Publisher(WeightSource.from_tensors(tensors)) as publisher:
        monkeypatch.setattr(Segment, "__init__", count)
        from vime_sync import SyncSession

        with SyncSession([engine.url], publisher.manifest(), deadline_s=20) as session:
            for version in (1, 2, 3):
                publisher.stage(version)
                session.update(version)
    assert len(opened) == 2  # the weights, and the control block, once for all syncs
    assert engine.content() == content_of(1)


def test_a_failed_update_does_not_wedge_the_next_one(engines, trainers):
    """vLLM 0.32: after an exception in finish, every further start is "already active"; one rank's flag stays set."""
    engine, trainer = engines(world=2), ready(trainers, checkpoint(1))
    session = trainer.session(engine)
    real = engine.control.receivers[1].handle

    def fail(message):
        if message["op"] == "stage":
            return {**real({"op": "state"}), "ok": False, "error": "TransportError", "what": "a link went down"}
        return real(message)

    engine.control.receivers[1].handle = fail
    with pytest.raises(Exception, match="a link went down"):
        session.update(1)
    engine.control.receivers[1].handle = real
    assert [receiver.state for receiver in engine.control.receivers] == ["idle", "idle"]
    session.update(1)
    assert engine.content() == content_of(1, 2)


def test_a_version_is_never_announced_without_its_bytes(engines, trainers):
    """TRL, vLLM and sglang can raise the version with no transfer."""
    engine, trainer = engines(), ready(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.connect()
    for body in ({"version": 7}, {"version": 7, "digest": "0" * 32}):
        with pytest.raises(Exception, match="not staged"):
            session._engines[0].call("commit", {"session": session._id, **body})
    assert engine.control.tag == "default"


@pytest.mark.parametrize("name", ["shm", "delta"])
def test_nan_and_infinity_are_ordinary_values(engines, trainers, tmp_path, name):
    """vLLM's sparse engine forbids NaN, because it marks what did not change with it."""
    tensors = checkpoint(1)
    tensors["layers.0.o_proj.weight"][0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    trainer = ready(trainers, tensors, 1, name, options={"folder": tmp_path} if name == "delta" else None)
    engine = engines()
    trainer.session(engine).update(1)
    assert engine.content() == content_of(0, tensors=tensors)


def test_a_buffer_that_was_re_allocated_is_noticed():
    """Ray RDT: a descriptor cached by data_ptr outlived its allocation."""
    flat = torch.randn(64)
    with Publisher(WeightSource.from_tensors({"w": flat})) as publisher:
        publisher.stage(1)
        (buffer,) = publisher.source.buffers.values()
        buffer.data = torch.randn(64)
        with pytest.raises(StaleSourceError, match="moved or offloaded"):
            publisher.stage(2)


def test_a_stale_version_cannot_overtake(engines, trainers):
    """Late messages of an earlier step arrived after newer weights."""
    engine, trainer = engines(), ready(trainers, checkpoint(1))
    session = trainer.session(engine)
    late = session._body(session._engines[0], 1) if session.connect() else {}
    trainer.publisher.stage(2)
    session.update(2)
    with pytest.raises(VersionConflictError):
        session._engines[0].call("update", late)
    assert engine.control.tag == "2"
