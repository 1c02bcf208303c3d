"""Aliased weights without an inference engine: the layout, the writing block, and the trainer's hold on its memory."""

import httpx
import pytest
import torch
from sync_alias import AliasTrainer, laid_out, let_go, on_memory, plan_of
from sync_fake_engine import FakeModel, checkpoint, content_of
from vime_sync import (
    AliasError,
    AsleepError,
    CheckpointTensor,
    NotPausedError,
    Piece,
    Publisher,
    Region,
    StaleSourceError,
    SyncSession,
    TornEngineError,
    WeightSource,
    shared_empty,
)
from vime_sync.layout import contiguous_strides, whole


@pytest.fixture
def aliased(engines):
    """A function that makes a trainer, an engine on its memory and a session between them."""
    made = []

    def make(world=1, **options):
        session_options = {key: options.pop(key) for key in ("mode", "in_flight") if key in options}
        trainer = AliasTrainer(world, **options)
        engine = engines(control=trainer.control(world))
        session = SyncSession([engine.url], trainer.manifest, deadline_s=20, **session_options)
        made.append((trainer, engine.control, session))
        return trainer, engine, session

    yield make
    for trainer, control, session in made:
        session.close()
        let_go(control)
        trainer.close()


def block(session, version, *steps):
    """Run steps in a writing block."""
    with session.writing(version):
        for step in steps:
            step()


def fail():
    """A training step that fails."""
    raise ZeroDivisionError


def generate(engine):
    return httpx.post(f"{engine.url}/inference/v1/generate", json={}, timeout=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_a_block_commits_what_was_written_and_moves_nothing(aliased, world, dtype):
    trainer, engine, session = aliased(world, dtype=dtype)
    before = [{n: t.data_ptr() for n, t in m.live().items()} for m in engine.control.models]
    assert engine.content() == content_of(1, world, dtype)
    for version, seed in ((1, 2), (4, 3)):
        with session.writing(version) as block:
            assert engine.control.paused
            assert generate(engine).status_code == 503
            for publisher in trainer.publishers:
                publisher._control.begin()
            trainer.fill(seed)
            for publisher in trainer.publishers:
                publisher.stage(version)
        report = block.report
        assert (report.mode, report.bytes, report.version) == ("alias", 0, version)
        assert {"pause", "open", "commit", "publish", "resume", "paused"} >= set(report.phases) - {"copy"}
        assert generate(engine).json() == {"version": str(version), "content": content_of(seed, world, dtype)}
    assert before == [{n: t.data_ptr() for n, t in m.live().items()} for m in engine.control.models]


def test_a_block_costs_two_requests_and_drops_the_caches_once(aliased):
    trainer, engine, session = aliased()
    session.connect()
    seen, real, drops = [], session._engines[0].call, engine.control.drops
    session._engines[0].call = lambda operation, body=None: (seen.append(operation), real(operation, body))[1]
    trainer.write(session, 1, 2)
    assert seen == ["open", "update"]
    assert engine.control.drops == drops + 1


def test_the_digest_of_an_aliased_engine_is_that_of_one_that_copies(aliased, engines, trainers):
    trainer, _, session = aliased()
    report = trainer.write(session, 1, 2)
    other = trainers(checkpoint(2))
    other.publisher.stage(1)
    assert report.digest == other.session(engines(world=2)).update(1).digest


def test_an_engine_on_a_running_trainers_memory_serves_the_version_that_is_there(aliased):
    trainer, engine, session = aliased(version=7)
    session.connect()
    assert session.versions() == [7]
    assert generate(engine).json()["version"] == "7"
    trainer.write(session, 8, 2)
    assert session.resync(engine.url).bytes == 0


def test_one_block_serves_an_aliasing_and_a_copying_engine(engines):
    trainer = AliasTrainer()
    pair = engines(control=trainer.control()), engines(world=2)
    with SyncSession([engine.url for engine in pair], trainer.manifest, deadline_s=20) as session:
        report = trainer.write(session, 1, 2)
        assert report.engines == 2
        assert [engine.content() for engine in pair] == [content_of(2), content_of(2, 2)]
    let_go(pair[0].control)
    trainer.close()


def test_a_block_that_fails_before_its_first_write_leaves_the_old_version(aliased):
    trainer, engine, session = aliased()
    trainer.write(session, 1, 2)
    with pytest.raises(ZeroDivisionError):
        block(session, 2, fail)
    assert generate(engine).json() == {"version": "1", "content": content_of(2)}
    trainer.write(session, 2, 3)
    assert generate(engine).json()["version"] == "2"


@pytest.mark.parametrize("world", [1, 2])
def test_a_block_that_fails_after_it_refuses_to_serve_until_a_whole_version_is_there(aliased, world):
    trainer, engine, session = aliased(world)
    with pytest.raises(ZeroDivisionError):
        block(session, 1, trainer.publishers[-1]._control.begin, fail)
    answer = generate(engine)
    assert (answer.status_code, answer.json()["error"]) == (503, "TornEngineError")
    assert "gave up" in answer.json()["seen"]
    trainer.write(session, 2, 3)
    assert generate(engine).json() == {"version": "2", "content": content_of(3, world)}


def test_a_block_in_which_not_every_rank_staged_is_torn_and_not_resumed(aliased):
    trainer, engine, session = aliased(2)
    first, second = trainer.publishers
    steps = (first._control.begin, second._control.begin, lambda: trainer.fill(2), lambda: first.stage(1))
    with pytest.raises(StaleSourceError, match="middle of a write"):
        block(session, 1, *steps)
    assert engine.control.paused
    assert generate(engine).status_code == 503
    trainer.write(session, 2, 3)
    assert generate(engine).json() == {"version": "2", "content": content_of(3, 2)}


def test_a_byte_that_changes_behind_the_digest_is_found(aliased):
    trainer, engine, session = aliased()
    publisher = trainer.publisher
    flat = publisher.source.buffers["flat"]
    steps = (publisher._control.begin, lambda: trainer.fill(2), lambda: publisher.stage(1), lambda: flat[3:4].add_(1))
    with pytest.raises(TornEngineError):
        block(session, 1, *steps)
    assert generate(engine).status_code == 503


@pytest.mark.parametrize("path", ["/resume", "/wake_up"])
def test_nobody_resumes_an_engine_while_its_weights_are_written(aliased, path):
    trainer, engine, session = aliased()
    with session.writing(1):
        trainer.publisher._control.begin()
        answer = httpx.post(engine.url + path, timeout=20)
        assert (answer.status_code, answer.json()["error"]) == (409, "AlreadyStartedError")
        assert "version 1" in answer.json()["seen"]
        assert engine.control.paused
        trainer.publisher.stage(1)
    assert not engine.control.paused


def test_an_engine_that_was_resumed_behind_our_back_is_found_out_and_torn(aliased):
    trainer, engine, session = aliased()

    def resume():
        engine.control.paused = False  # not over HTTP

    with pytest.raises(NotPausedError, match="resumed while the trainer wrote"):
        block(session, 1, trainer.publisher._control.begin, resume, lambda: trainer.publisher.stage(1))
    assert engine.control.paused
    assert generate(engine).status_code == 503


def test_an_update_outside_a_block_is_refused(aliased):
    trainer, engine, session = aliased()
    session.connect()
    trainer.publisher.stage(1)
    with pytest.raises(NotPausedError, match="writing"):
        session.update(1)
    assert generate(engine).json() == {"version": "0", "content": content_of(1)}


def test_a_sleeping_engine_is_not_opened(aliased):
    _, engine, session = aliased()
    engine.model.sleeping = "2 allocations of weights are offloaded"
    with pytest.raises(AsleepError, match="wake_up"), session.writing(1):
        pytest.fail("the block must not begin")
    engine.model.sleeping = ""
    assert not engine.control.paused
    assert session.states()[0]["state"] == "idle"


def test_an_engine_that_was_paused_before_stays_paused(aliased):
    trainer, engine, session = aliased(in_flight="paused")
    with pytest.raises(NotPausedError, match="generating"), session.writing(1):
        pytest.fail("the block must not begin")
    httpx.post(f"{engine.url}/pause", timeout=20)
    trainer.write(session, 1, 2)
    assert engine.control.paused


def test_memory_that_an_engine_runs_on_is_not_given_away(aliased):
    trainer, engine, session = aliased()
    trainer.write(session, 1, 2)
    with pytest.raises(AliasError, match="an engine runs on these buffers") as refused:
        trainer.publisher.close()
    assert "stop those engines first" in str(refused.value)
    assert generate(engine).json()["version"] == "1"  # nothing was closed
    let_go(engine.control)
    trainer.publisher.close()


@pytest.mark.parametrize("how", ["moved", "offloaded"])
def test_a_trainer_that_moves_or_offloads_what_is_aliased_is_told_at_once(aliased, how):
    trainer, engine, session = aliased()
    flat = trainer.publisher.source.buffers["flat"]
    kept = flat.data

    def write():
        with trainer.publisher.writing(1):
            flat.data = kept.clone() if how == "moved" else torch.empty(0)

    with pytest.raises(StaleSourceError, match="moved or offloaded"):
        block(session, 1, write)
    flat.data = kept
    assert generate(engine).status_code == 503  # it may have been written before it was moved
    trainer.write(session, 2, 3)
    assert generate(engine).json() == {"version": "2", "content": content_of(3)}


def test_modes_do_not_mix(aliased, engines):
    trainer, engine, _ = aliased()
    for mode in ("shadow", "undo", "direct"):
        with (
            pytest.raises(AliasError, match="aliased from its start"),
            SyncSession([engine.url], trainer.manifest, deadline_s=20, mode=mode),
        ):
            pass
    with (
        pytest.raises(AliasError, match="weights of its own"),
        SyncSession([engines().url], trainer.manifest, deadline_s=20, mode="alias"),
    ):
        pass


def test_an_engine_on_the_memory_of_another_publisher_is_refused(aliased):
    _, engine, _ = aliased()
    other = AliasTrainer()
    with (
        pytest.raises(AliasError, match="another publisher"),
        SyncSession([engine.url], other.manifest, deadline_s=20, takeover=True),
    ):
        pass
    other.close()


# -- the layout contract ----------------------------------------------------------------------------------------------


def refused(source, match):
    """Bind an engine to a layout that does not fit; the whole text."""
    with Publisher(source) as publisher:
        publisher.stage(0)
        model = FakeModel()
        before = model.content()
        with pytest.raises(AliasError, match=match) as error:
            on_memory(model, publisher.manifest())
        assert model.content() == before
        assert model.binding is None
    return str(error.value)


def plain(tensors):
    """Each checkpoint tensor in a shared buffer of its own."""
    buffers, described = {}, []
    for name, tensor in tensors.items():
        buffers[name] = shared_empty(tensor.numel(), tensor.dtype)
        buffers[name].copy_(tensor.reshape(-1))
        shape = tuple(tensor.shape)
        region = Region(0, name, 0, shape, contiguous_strides(shape))
        described.append(CheckpointTensor(name, shape, tensor.dtype, (Piece(whole(shape), region),)))
    return WeightSource.from_regions(buffers, described)


def test_every_tensor_that_is_not_one_region_is_listed_with_its_reason():
    text = refused(plain(checkpoint(1)), "live tensors cannot be aliased")
    assert (
        "layers.0.qkv_proj.weight: layers.0.q_proj.weight and layers.0.k_proj.weight lie in different buffers" in text
    )
    assert "the buffer ends before its padding" in text


def test_neighbours_in_another_order_are_refused():
    source = laid_out()
    tensors = list(source.tensors)
    at = {tensor.name: index for index, tensor in enumerate(tensors)}
    k, v = (tensors[at[f"layers.0.{n}_proj.weight"]] for n in "kv")
    tensors[at[k.name]] = CheckpointTensor(k.name, k.shape, k.dtype, v.pieces)
    tensors[at[v.name]] = CheckpointTensor(v.name, v.shape, v.dtype, k.pieces)
    swapped = WeightSource.from_regions(source.buffers, tensors)
    assert "not neighbours in the engine's order" in refused(swapped, "1 of")


def test_rows_of_a_larger_matrix_are_refused():
    source = laid_out()
    name = "layers.1.o_proj.weight"
    rows = shared_empty(8 * 32, torch.float32)
    region = Region(0, "wide", 0, (8, 16), (32, 1))
    tensors = [
        CheckpointTensor(t.name, t.shape, t.dtype, (Piece(whole(t.shape), region),)) if t.name == name else t
        for t in source.tensors
    ]
    wide = WeightSource.from_regions({**source.buffers, "wide": rows}, tensors)
    assert "rows of a larger matrix" in refused(wide, name)


def test_a_misaligned_start_is_refused():
    assert "no multiple of 16" in refused(laid_out(gap=2), "starts at byte 8")


def test_padding_with_other_values_is_refused():
    source = laid_out()
    (embed,) = (t for t in source.tensors if t.name == "embed.weight")
    source.buffers["flat"][embed.pieces[0].region.end] = 1.0
    assert "fill the padding" in refused(source, "padding of a tensor has other values")


def test_padding_over_another_tensor_is_refused():
    plan, shapes = plan_of(0, 1)
    source = laid_out(order=["embed.weight", *(n for n in shapes if n != "embed.weight")])
    (embed,) = (t for t in source.tensors if t.name == "embed.weight")
    end = embed.pieces[0].region.end
    moved = [
        CheckpointTensor(t.name, t.shape, t.dtype, (Piece(whole(t.shape), Region(0, "flat", end, t.shape, (1,))),))
        if t.name == "norm.weight"
        else t
        for t in source.tensors
    ]
    text = refused(WeightSource.from_regions(source.buffers, moved), "embed.weight")
    assert "another tensor lies where its padding would be" in text
    assert plan.fills
