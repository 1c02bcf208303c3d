"""The transaction over HTTP, with real receivers and routes and a made-up model: what is served, and when."""

import httpx
import pytest
import torch
from sync_fake_engine import FakeModel, checkpoint, content_of
from vime_sync import (
    AlreadyStartedError,
    AsleepError,
    DigestError,
    DtypeMismatchError,
    EmptyUpdateError,
    EngineError,
    IncompletePlanError,
    NotPausedError,
    NotStartedError,
    PlanError,
    Publisher,
    SecondTrainerError,
    ShapeMismatchError,
    StaleSourceError,
    SyncSession,
    TornEngineError,
    TransactionError,
    UnknownNameError,
    UnplannableError,
    VersionConflictError,
    WeightSource,
)

MODES = ["shadow", "undo", "direct"]


def generate(engine):
    return httpx.post(f"{engine.url}/inference/v1/generate", json={}, timeout=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_served_bytes_are_those_of_load_weights(engines, trainers, mode, world, dtype):
    engine, trainer = engines(world=world, dtype=dtype), trainers(checkpoint(1, dtype))
    session = trainer.session(engine, mode=mode)
    for version, seed in ((1, 1), (2, 2), (5, 3)):
        trainer.load(checkpoint(seed, dtype))
        trainer.publisher.stage(version)
        report = session.update(version)
        assert engine.content() == content_of(seed, world, dtype)
        assert generate(engine).json() == {"version": str(version), "content": content_of(seed, world, dtype)}
        assert (report.version, report.mode, report.engines) == (version, mode, 1)
        assert report.digest == session.states()[0]["digest"]
        assert len(report.digest) == 32
    assert session.versions() == [5]


@pytest.mark.parametrize("digest", ["off", "sampled"])
def test_other_digest_modes_serve_the_same_bytes(engines, trainers, digest):
    engine, trainer = engines(), trainers(checkpoint(1), digest=digest)
    trainer.publisher.stage(1)
    assert trainer.session(engine).update(1).digest_mode == digest
    assert engine.content() == content_of(1)


def test_the_digest_does_not_depend_on_the_engines_layout(engines, trainers):
    trainer = trainers(checkpoint(1))
    trainer.publisher.stage(1)
    digests = {trainer.session(engines(world=world)).update(1).digest for world in (1, 2)}
    assert len(digests) == 1


def test_sharded_trainer_ranks_feed_a_sharded_engine(engines):
    tensors = checkpoint(4)
    from vime_sync import Box, CheckpointTensor, Piece, Region, merge_manifests

    publishers = []
    for rank in range(2):
        buffers, described = {}, []
        for name, tensor in tensors.items():
            half = tensor.shape[0] // 2
            part = (tensor[:half] if rank == 0 else tensor[half:]).contiguous().clone()
            start = (0 if rank == 0 else half, *(0,) * (tensor.dim() - 1))
            buffers[name] = part.reshape(-1)
            region = Region(rank, name, 0, tuple(part.shape), part.stride())
            piece = Piece(Box(start, tuple(part.shape)), region)
            described.append(CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, (piece,)))
        publishers.append(Publisher(WeightSource.from_regions(buffers, described, rank=rank)))
    engine = engines(world=2)
    try:
        manifest = merge_manifests([p.manifest() for p in publishers])
        with SyncSession([engine.url], manifest, deadline_s=20) as session:
            publishers[0].stage(1)
            with pytest.raises(StaleSourceError, match="another version"):
                session.update(1)
            publishers[1].stage(1)
            session.update(1)
        assert engine.content() == content_of(4, 2)
    finally:
        for publisher in publishers:
            publisher.close()


def test_all_engines_or_none(engines, trainers):
    first, second, trainer = engines(), engines(world=2), trainers(checkpoint(1))
    session = trainer.session(first, second)
    trainer.publisher.stage(1)
    report = session.update(1)
    assert (report.engines, session.versions()) == (2, [1, 1])
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    second.model.sleeping = "weights offloaded"
    with pytest.raises(AsleepError, match="weights offloaded"):
        session.update(2)
    assert (first.content(), second.content()) == (content_of(1), content_of(1, 2))
    assert {s["state"] for s in session.states()} == {"idle"}
    second.model.sleeping = ""
    session.update(2)
    assert (first.content(), second.content()) == (content_of(2), content_of(2, 2))


def refuse(engine, trainer, error, match, version=1, **options):
    """Run an update that must be refused by name, and check that nothing was written or announced."""
    before, label = engine.content(), engine.control.tag
    session = trainer.session(engine, **options)
    with pytest.raises(error, match=match):
        session.update(version)
    assert engine.content() == before
    assert engine.control.tag == label
    assert not engine.control.paused
    assert generate(engine).status_code == 200
    return session


def staged(trainers, tensors, version=1, **options):
    trainer = trainers(tensors, **options)
    trainer.publisher.stage(version)
    return trainer


def test_an_unknown_name_is_refused(engines, trainers):
    trainer = staged(trainers, checkpoint(1) | {"layers.0.surprise.weight": torch.ones(2)})
    refuse(engines(), trainer, UnknownNameError, "surprise")


def test_a_missing_tensor_is_refused(engines, trainers):
    trainer = staged(trainers, checkpoint(1, drop=["layers.1.k_proj.weight"]))
    refuse(engines(), trainer, IncompletePlanError, "partly written.*layers.1.qkv_proj")


def test_a_missing_expert_is_refused(engines, trainers):
    trainer = staged(trainers, checkpoint(1, drop=["layers.1.experts.1.down_proj.weight"]))
    refuse(engines(), trainer, IncompletePlanError, "layers.1.experts.w2")


def test_a_wrong_shape_is_refused(engines, trainers):
    tensors = checkpoint(1)
    tensors["layers.0.o_proj.weight"] = torch.zeros(8, 12)
    refuse(engines(), staged(trainers, tensors), ShapeMismatchError, "layers.0.o_proj.weight")


def test_a_wrong_dtype_is_refused_and_converted_when_asked_for(engines, trainers):
    engine, tensors = engines(), checkpoint(1, torch.bfloat16)
    trainer = staged(trainers, tensors)
    refuse(engine, trainer, DtypeMismatchError, "bfloat16.*float32")
    trainer.session(engine, cast=True).update(1)
    assert engine.content() == content_of(1, tensors={n: t.float() for n, t in tensors.items()})


def test_an_empty_update_is_refused():
    publisher = Publisher(WeightSource.from_tensors({}))
    try:
        with pytest.raises(EmptyUpdateError):
            SyncSession(["http://127.0.0.1:9"], publisher.manifest(), deadline_s=1)
    finally:
        publisher.close()


def test_what_post_processing_changed_is_refused(engines, trainers):
    engine = engines()
    engine.model.obstacle = {"layers.0.experts.w13": "a kernel handle holds it packed"}
    refuse(engine, staged(trainers, checkpoint(1)), UnplannableError, "w13.*packed")


@pytest.mark.parametrize("mode", ["shadow", "direct"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_no_copy_reaches_is_loaded_again_where_that_is_allowed(engines, trainers, world, mode):
    engine, trainer = engines(world=world), staged(trainers, checkpoint(1))
    for model in engine.control.models:
        model.obstacle = {"layers.0.experts.w13": "a kernel handle holds it packed"}
    session = trainer.session(engine, reload=True, mode=mode)
    report = session.update(1)
    assert report.reload == {"layers.0.experts.w13": "a kernel handle holds it packed"}
    assert engine.content() == content_of(1, world)
    assert [model.reloads for model in engine.control.models] == [1] * world
    trainer.publisher.stage(2)
    segment = trainer.publisher._exporter._segment
    handle = next(
        p.region for t in trainer.publisher.source.tensors for p in t.pieces if "layers.0.experts.0.gate" in t.name
    )
    at = trainer.publisher.manifest()["sources"][0]["buffers"][handle.buffer]["handle"]["offset"]
    segment.tensor(torch.uint8, 8, at)[2] ^= 64
    with pytest.raises(TornEngineError):
        session.update(2)
    trainer.publisher.stage(3)
    session.update(3)
    assert engine.content() == content_of(1, world)


def test_a_reload_cannot_be_undone_or_aliased(engines, trainers):
    engine = engines()
    engine.model.obstacle = {"layers.0.experts.w13": "packed"}
    refuse(engine, staged(trainers, checkpoint(1)), TransactionError, "taken back", reload=True, mode="undo")


def test_versions_only_rise_and_compare(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1), version=3)
    session = trainer.session(engine)
    session.update(3)
    for stale in (3, 2):
        with pytest.raises(VersionConflictError):
            session.update(stale)
    with pytest.raises(VersionConflictError, match="only rise"):
        trainer.publisher.stage(2)
    trainer.publisher.stage(4)
    session._engines[0].version = 1  # a controller that lost count: compare-and-set refuses its base
    with pytest.raises(VersionConflictError, match="not where the update starts"):
        session.update(4)
    assert engine.content() == content_of(1)


def test_an_update_of_what_is_not_staged_is_refused(engines, trainers):
    refuse(engines(), staged(trainers, checkpoint(1)), StaleSourceError, "another version", version=2)


def test_a_second_trainer_is_refused_until_it_takes_over(engines, trainers):
    engine, first, second = engines(), staged(trainers, checkpoint(1)), staged(trainers, checkpoint(2), version=2)
    session = first.session(engine)
    session.update(1)
    with pytest.raises(SecondTrainerError, match="takeover"):
        second.session(engine).connect()
    assert engine.content() == content_of(1)
    second.session(engine, takeover=True).update(2)
    assert engine.content() == content_of(2)
    first.publisher.stage(3)
    with pytest.raises((SecondTrainerError, VersionConflictError)):
        session.update(3)


def test_a_running_engine_is_refused_when_the_caller_promised_a_pause(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = refuse(engine, trainer, NotPausedError, "generating", in_flight="paused")
    httpx.post(f"{engine.url}/pause")
    session.update(1)
    assert engine.control.paused  # the caller's pause is the caller's to end
    assert engine.content() == content_of(1)


def test_not_paused_is_named_with_several_engines_too(engines, trainers):
    first, second, trainer = engines(), engines(), staged(trainers, checkpoint(1))
    session = trainer.session(first, second, in_flight="paused")
    with pytest.raises(NotPausedError):
        session.update(1)
    assert {s["state"] for s in session.states()} == {"idle"}


@pytest.mark.parametrize("mode", MODES)
def test_a_sleeping_engine_is_refused(engines, trainers, mode):
    engine = engines()
    engine.model.sleeping = "2 allocations of weights are offloaded"
    refuse(engine, staged(trainers, checkpoint(1)), AsleepError, "wake_up", mode=mode)


def test_a_double_start_is_refused_and_the_first_one_stands(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.connect()
    call = session._engines[0].call
    body = session._body(session._engines[0], 1)
    call("stage", body)
    with pytest.raises(AlreadyStartedError, match="version 1 is staged"):
        call("stage", body)
    assert call("commit", body)["version"] == 1
    assert call("commit", body)["version"] == 1  # asked again: the answer may have been lost
    assert engine.content() == content_of(1)


def test_a_commit_of_nothing_and_steps_without_a_connection_are_refused(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    call, body = session._engines[0].call, session._body(session._engines[0], 1)
    with pytest.raises(NotStartedError, match="no trainer is connected"):
        call("stage", body)
    session.connect()
    with pytest.raises(NotStartedError, match="not staged"):
        call("commit", body)
    with pytest.raises(NotStartedError, match="not staged"):
        call("commit", body | {"version": 7})


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("stage", {"session": 3, "version": 1, "base": -1}),
        ("stage", {"session": "x", "version": "1", "base": -1, "deadline_s": "soon"}),
        ("commit", {"session": "x", "version": True}),
        ("connect", {"session": "x", "manifest": {"format": 9}}),
        ("connect", []),
    ],
)
def test_a_malformed_message_is_refused(engines, operation, body):
    engine = engines()
    response = httpx.post(f"{engine.url}/vime/{operation}", json=body)
    assert response.status_code == 409
    assert response.json()["error"] in ("TransactionError", "ManifestError", "NotStartedError")
    assert httpx.post(f"{engine.url}/vime/stage", content=b"{not json").json()["error"] == "TransactionError"


def corrupt(trainer):
    """Change a published byte behind the digest's back."""
    trainer.publisher._exporter._segment.tensor(torch.uint8, 4)[1] ^= 64


def test_wrong_bytes_are_found_before_a_shadow_is_committed(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    corrupt(trainer)
    session = refuse(engine, trainer, DigestError, "not those that were published", mode="shadow")
    trainer.publisher.stage(2)
    session.update(2)
    assert engine.content() == content_of(1)


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_bytes_are_taken_back_from_the_undo_log(engines, trainers, world):
    engine, trainer = engines(world=world), staged(trainers, checkpoint(1))
    corrupt(trainer)
    refuse(engine, trainer, DigestError, "not those that were published", mode="undo")


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_bytes_written_in_place_leave_an_engine_that_refuses_to_serve(engines, trainers, world):
    engine, trainer = engines(world=world), staged(trainers, checkpoint(1))
    session = trainer.session(engine, mode="direct")
    session.update(1)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    corrupt(trainer)
    with pytest.raises(TornEngineError):
        session.update(2)
    assert engine.control.tag == "1"
    assert engine.control.paused
    state = session.states()[0]
    assert (state["state"], state["version"]) == ("torn", 1)
    for path in ("/inference/v1/generate", "/resume"):
        response = httpx.post(engine.url + path, json={})
        assert response.status_code == 503
        assert response.json()["error"] == "TornEngineError"
        assert "whole newer version" in response.json()["fix"]
    assert engine.control.paused
    trainer.publisher.stage(3)
    session.update(3)
    assert engine.content() == content_of(2, world)
    assert generate(engine).json()["version"] == "3"  # it went on by itself: the pause was the failed update's
    assert session.states()[0]["torn"] == ""


def test_an_abort_leaves_the_old_bytes(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    before = engine.content()
    session = trainer.session(engine)
    session.connect()
    call, body = session._engines[0].call, session._body(session._engines[0], 1)
    call("stage", body)
    assert session.states()[0]["state"] == "staged"
    session.abort()
    assert session.states()[0]["state"] == "idle"
    assert engine.content() == before
    with pytest.raises(NotStartedError):
        call("commit", body)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_fails_alone_does_not_leave_a_mixed_engine(engines, trainers, mode):
    engine, trainer = engines(world=2), staged(trainers, checkpoint(1))
    session = trainer.session(engine, mode=mode)
    session.update(1)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    moved = engine.control.models[1]
    real = moved.parameters["layers.0.o_proj.weight"]

    async def move(message, deadline):
        if message["op"] == "commit":
            moved.parameters["layers.0.o_proj.weight"] = real.clone()  # worker 1 refuses, worker 0 has written

    engine.control.hook = move
    with pytest.raises(PlanError, match="moved since the plan"):
        session.update(2)
    moved.parameters["layers.0.o_proj.weight"] = real
    engine.control.hook = None
    state = session.states()[0]
    if mode == "undo":
        assert (state["state"], engine.content()) == ("idle", content_of(1, 2))
        assert generate(engine).json()["content"] == content_of(1, 2)
    else:
        assert state["state"] == "torn"
        assert generate(engine).status_code == 503
    trainer.publisher.stage(3)
    session.connect()
    session.update(3)
    assert engine.content() == content_of(2, 2)
    assert generate(engine).status_code == 200


def test_an_engine_that_cannot_publish_its_version_is_torn(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    engine.control.publish_error = "the front end is gone"
    with pytest.raises(EngineError, match="front end"):
        session.update(1)
    engine.control.publish_error = None
    assert generate(engine).status_code == 503
    trainer.publisher.stage(2)
    session.update(2)
    assert generate(engine).json()["version"] == "2"


def test_caches_are_dropped_with_every_commit(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.update(1)
    assert engine.control.drops == 1
    httpx.post(f"{engine.url}/pause")
    trainer.publisher.stage(2)
    session.update(2)
    assert engine.control.drops == 3  # the caller's pause dropped some, and so did the commit


def test_a_moved_live_tensor_is_refused(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.connect()
    kept = engine.model.parameters["norm.weight"]
    engine.model.parameters["norm.weight"] = kept.clone()
    with pytest.raises(PlanError, match="moved since the plan"):
        session.update(1)
    assert engine.content() == FakeModel().content().split()


def test_a_server_without_our_routes_and_one_that_is_gone_are_told_apart(trainers, engines):
    engine = engines()
    trainer = staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session._engines[0]._http.base_url = engine.url + "/elsewhere"
    with pytest.raises(EngineError, match="no vime routes"):
        session.connect()
    engine.gone()
    with pytest.raises(EngineError, match="cannot be reached"):
        trainer.session(engine).connect()


def test_a_session_goes_on_after_an_answer_was_lost(engines, trainers):
    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.connect()
    client, real = session._engines[0], session._engines[0].call

    def lose(operation, body=None):
        real(operation, body)
        client.call = real
        raise EngineError("an engine did not answer in time", where=operation)

    client.call = lose
    with pytest.raises(EngineError, match="in time"):
        session.update(1)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    session.update(2)  # it asks again what the engine holds, and finds version 1
    assert (session.versions(), engine.content()) == ([2], content_of(2))


def test_a_session_finds_a_restarted_engine(engines, trainers):
    from sync_fake_engine import FakeControl

    engine, trainer = engines(), staged(trainers, checkpoint(1))
    session = trainer.session(engine)
    session.update(1)
    engine.sync.engine = FakeControl([FakeModel()])  # the same address, a new process
    trainer.publisher.stage(2)
    with pytest.raises(NotStartedError, match="no trainer is connected"):
        session.update(2)
    session.update(2)
    assert engine.sync.engine.models[0].content() == content_of(1)[0]
