"""Engines that come, go and start again while a session lives."""

import pytest
import torch
from sync_fake_engine import FakeControl, FakeModel, checkpoint, content_of
from vime_sync import (
    DigestError,
    EngineError,
    NotStartedError,
    SecondTrainerError,
    StaleSourceError,
    SyncSession,
    TornEngineError,
    TransactionError,
)


def served(engines, trainers, *worlds, version=1, **options):
    """A session whose engines serve checkpoint 1 as `version`."""
    found = [engines(world=world) for world in worlds or (1, 2)]
    trainer = trainers(checkpoint(1))
    trainer.publisher.stage(version)
    session = trainer.session(*found, **options)
    session.update(version)
    return session, trainer, found


def restart(engine, world=1):
    """The same address, new processes with weights of their own."""
    engine.sync.engine = FakeControl([FakeModel(rank, world, seed=9) for rank in range(world)])
    return engine.sync.engine


def contents(control):
    return [model.content() for model in control.models]


@pytest.mark.parametrize("mode", ["shadow", "undo", "direct"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_started_again_gets_the_present_version_and_nobody_else_notices(engines, trainers, mode, world):
    session, trainer, (first, second) = served(engines, trainers, 1, world, version=4, mode=mode)
    drops, fresh = first.control.drops, restart(second, world)
    session.replace(second.url, second.url)
    report = session.resync(second.url)
    assert contents(fresh) == content_of(1, world)
    assert (report.version, report.engines, report.mode, fresh.tag) == (4, 1, mode, "4")
    assert report.digest == trainer.publisher.staged_digest
    assert first.control.drops == drops
    trainer.load(checkpoint(2))
    trainer.publisher.stage(5)
    session.update(5)
    assert first.content() == content_of(2)
    assert contents(fresh) == content_of(2, world)


def test_an_engine_at_another_address_takes_the_place_of_a_dead_one(engines, trainers):
    session, trainer, (first, second) = served(engines, trainers)
    second.gone()
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    with pytest.raises(EngineError):
        session.update(2)
    assert first.content() == content_of(1)
    third = engines(seed=9)
    session.replace(second.url + "/", third.url)
    assert session.urls == [first.url, third.url]
    with pytest.raises(StaleSourceError, match="another version"):
        session.resync(third.url)  # the trainer holds version 2 already
    session.update(2)  # which brings both there, wherever they stand
    assert (first.content(), third.content(), session.versions()) == (content_of(2), content_of(2), [2, 2])


def test_an_engine_that_was_lost_at_the_commit_is_brought_to_what_the_others_serve(engines, trainers):
    session, trainer, (first, second) = served(engines, trainers, 1, 1)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    real = session._engines[1].call

    def lose(operation, body=None):
        if operation == "commit":
            raise EngineError("an engine cannot be reached", where=operation)
        return real(operation, body)

    session._engines[1].call = lose
    with pytest.raises(EngineError, match="resync"):
        session.update(2)
    fresh = restart(second)
    session.replace(second.url, second.url)
    assert session.resync(second.url).version == 2
    assert (first.content(), contents(fresh)) == (content_of(2), content_of(2))


def test_a_resync_needs_the_bytes_that_were_served(engines, trainers):
    session, trainer, (_, second) = served(engines, trainers)
    fresh = restart(second)
    before = contents(fresh)
    session.replace(second.url, second.url)
    trainer.publisher._control.begin()
    with pytest.raises(StaleSourceError, match="middle of a write"):
        session.resync(second.url)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(1)  # the same number, other bytes
    with pytest.raises(DigestError, match="other bytes for this version"):
        session.resync(second.url)
    assert contents(fresh) == before
    assert fresh.tag == "default"
    assert not fresh.paused
    trainer.load(checkpoint(1))
    trainer.publisher.stage(1)
    session.resync(second.url)
    assert contents(fresh) == content_of(1)


def test_an_engine_that_has_the_version_proves_it_by_its_bytes(engines, trainers):
    session, _, (_, second) = served(engines, trainers, 1, 2)
    report = session.resync(second.url)
    assert (report.bytes, report.version, len(report.digest)) == (0, 1, 32)
    with torch.no_grad():
        second.control.models[1].parameters["norm.weight"][0] += 1  # norms are replicated: worker 0 vouches for them
        second.control.models[1].parameters["layers.0.o_proj.weight"][0] += 1
    with pytest.raises(DigestError, match="an engine holds other bytes"):
        session.resync(second.url)


def test_a_torn_engine_is_not_brought_back_to_the_version_it_broke_in(engines, trainers):
    session, trainer, (first, second) = served(engines, trainers, 1, 1)
    trainer.publisher.stage(2)
    second.control.publish_error = "the front end is gone"
    with pytest.raises(EngineError, match="disagree"):
        session.update(2)
    second.control.publish_error = None
    with pytest.raises(TornEngineError, match="newer version"):
        session.resync(second.url)
    trainer.publisher.stage(3)
    session.update(3)
    assert first.content() == second.content() == content_of(1)


def test_engines_join_and_leave(engines, trainers):
    session, trainer, (first, second) = served(engines, trainers, 1, 1)
    third = engines()
    session.add(third.url)
    session.resync(third.url)
    assert third.content() == content_of(1)
    session.remove(first.url)
    assert session.urls == [second.url, third.url]
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    session.update(2)
    assert [e.content() for e in (first, second, third)] == [content_of(1), content_of(2), content_of(2)]
    other = trainers(checkpoint(3))  # an engine that left is free for another trainer
    other.publisher.stage(2)
    other.session(first).update(2)
    session.remove(second.url)
    with pytest.raises(TransactionError, match="needs an engine"):
        session.remove(third.url)
    for attempt in (session.add, lambda url: session.replace(url, url + "0"), session.resync):
        with pytest.raises(TransactionError):
            attempt(third.url if attempt == session.add else second.url)


def test_a_session_that_cannot_connect_lets_go_of_the_engines_it_reached(engines, trainers):
    free, taken = engines(), engines()
    trainers(checkpoint(1)).session(taken).connect()
    other = trainers(checkpoint(2))
    refused = SyncSession([free.url, taken.url], other.publisher.manifest(), deadline_s=20)
    with pytest.raises(SecondTrainerError), refused:
        pytest.fail("the block must not begin")
    assert all(engine._http.is_closed for engine in refused._engines)
    other.publisher.stage(1)
    other.session(free).update(1)
    assert free.content() == content_of(2)


@pytest.mark.parametrize("worlds", [(1,), (1, 2)])
def test_a_closed_session_says_so(engines, trainers, worlds):
    session, trainer, _ = served(engines, trainers, *worlds)
    session.close()
    session.close()
    trainer.publisher.stage(2)
    for attempt in (
        lambda: session.update(2),
        session.versions,
        session.connect,
        lambda: session.resync(session.urls[0]),
    ):
        with pytest.raises(NotStartedError, match="make a new"):
            attempt()


def test_nothing_is_resynced_before_something_is_served(engines, trainers):
    trainer, engine = trainers(checkpoint(1)), engines()
    session = trainer.session(engine)
    with pytest.raises(NotStartedError, match="no version is served"):
        session.resync(engine.url)


def test_digests_may_be_off(engines, trainers):
    trainer, engine = trainers(checkpoint(1), digest="off"), engines()
    trainer.publisher.stage(1)
    session = trainer.session(engine)
    session.update(1)
    assert session.resync(engine.url).bytes == 0
    fresh = restart(engine)
    session.replace(engine.url, engine.url)
    assert session.resync(engine.url).bytes > 0
    assert contents(fresh) == content_of(1)


@pytest.mark.parametrize("operation", ["stage", "commit"])
def test_a_session_of_several_asks_again_after_an_answer_was_lost(engines, trainers, operation):
    session, trainer, found = served(engines, trainers)
    client, real = session._engines[1], session._engines[1].call

    def lose(asked, body=None):
        reply = real(asked, body)
        if asked != operation:
            return reply
        client.call = real
        raise EngineError("an engine did not answer in time", where=asked)

    client.call = lose
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    with pytest.raises(EngineError):
        session.update(2)
    trainer.publisher.stage(3)
    session.update(3)
    assert [engine.content() for engine in found] == [content_of(2), content_of(2, 2)]


def test_a_session_of_several_connects_one_that_started_again(engines, trainers):
    session, trainer, (first, second) = served(engines, trainers, 1, 1)
    fresh = restart(second)
    trainer.load(checkpoint(2))
    trainer.publisher.stage(2)
    with pytest.raises(NotStartedError, match="no trainer is connected"):
        session.update(2)
    assert first.content() == content_of(1)
    session.update(2)
    assert (first.content(), contents(fresh)) == (content_of(2), content_of(2))
