"""What an error must not leave behind: paused engines, memory and files of nobody's, ports at which nobody answers."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from sync_fake_engine import checkpoint, content_of
from vime_sync import (
    AlreadyStartedError,
    EngineError,
    Publisher,
    StaleSourceError,
    TornEngineError,
    TransportError,
    WeightSource,
    control,
)
from vime_sync.control import SHM, segment_name
from vime_sync.transports import make_importer


def mine():
    """Names of shared memory that this process made."""
    return {path.name for path in SHM.glob(segment_name().rpartition("-")[0] + "-*")}


@contextlib.contextmanager
def no_file_larger_than(size):
    """What is larger fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# -- engines ----------------------------------------------------------------------------------------------------------


async def _for_ever(mode):
    await asyncio.sleep(600)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_pause_that_its_deadline_cut_off_is_not_left_behind(engines, trainers, monkeypatch, resumes):
    """Requests that are waited for (`in_flight="wait"`) may take longer than an update may."""
    engine, trainer = engines(), trainers(checkpoint(1))
    session = trainer.session(engine, in_flight="wait")
    session.connect()
    trainer.publisher.stage(1)
    scheduler, real = engine.control, engine.control.resume

    async def drain(mode):
        scheduler.paused = True  # nothing new is scheduled from here on
        await _for_ever(mode)

    async def resume():
        await (real() if resumes else _for_ever(""))

    monkeypatch.setattr("vime_sync.vllm_plugin.routes._PATIENCE_S", 0.5)
    monkeypatch.setattr(scheduler, "pause", drain)
    monkeypatch.setattr(scheduler, "resume", resume)
    body = session._body(session._engines[0], 1) | {"deadline_s": 2.0}
    with pytest.raises(EngineError, match="in time"):
        session._engines[0].call("update", body)
    assert scheduler.paused is not resumes
    monkeypatch.undo()
    session.update(1)
    assert (scheduler.paused, engine.content()) == (False, content_of(1))  # the commit resumes, if nothing did before


def test_an_engine_that_others_paused_stays_so_after_a_pause_that_was_cut_off(engines, trainers, monkeypatch):
    engine, trainer, modes = engines(), trainers(checkpoint(1)), []
    session = trainer.session(engine, in_flight="abort")
    session.connect()
    trainer.publisher.stage(1)
    engine.control.paused = True

    async def pause(mode):
        modes.append(mode)
        await _for_ever(mode)

    monkeypatch.setattr(engine.control, "pause", pause)
    with pytest.raises(EngineError, match="in time"):
        session._engines[0].call("update", session._body(session._engines[0], 1) | {"deadline_s": 1.0})
    assert engine.control.paused
    assert modes == ["keep"]  # what others froze is not ours to abort


def test_an_update_that_comes_too_late_does_not_drop_what_is_staged(engines, trainers):
    engine, trainer = engines(), trainers(checkpoint(1))
    session = trainer.session(engine)
    session.connect()
    trainer.publisher.stage(1)
    client, body = session._engines[0], session._body(session._engines[0], 1)
    client.call("stage", body)
    with pytest.raises(AlreadyStartedError, match="version 1 is staged"):
        client.call("update", body)
    client.call("commit", body)
    assert engine.content() == content_of(1)


def test_a_mix_is_not_called_whole_because_it_was_put_back(engines, trainers):
    engine, trainer = engines(), trainers(checkpoint(1))
    for version, mode in ((1, "direct"), (2, "undo")):
        session = trainer.session(engine, mode=mode)
        trainer.publisher.stage(version)
        trainer.publisher._exporter._segment.tensor(torch.uint8, 4)[1] ^= 64
        with pytest.raises(TornEngineError, match="mix of versions"):
            session.update(version)
        assert (session.states()[0]["state"], engine.control.paused) == ("torn", True)
        session.close()
    trainer.publisher.stage(3)
    trainer.session(engine, mode="undo").update(3)
    assert (engine.control.paused, engine.content()) == (False, content_of(1))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_publisher_that_cannot_be_made_leaves_no_shared_memory():
    before = mine()
    many = dict(enumerate(torch.zeros(1000).unbind()))  # more digests than bytes: the control block is the larger one
    source = WeightSource.from_tensors({f"t{i}": t for i, t in many.items()})
    with no_file_larger_than(8192), pytest.raises(TransportError, match="not enough shared memory") as caught:
        Publisher(source)
    assert caught.value.expected == f"{8 * (8 + 2 * 1000)} bytes", "the control block's, not the buffers'"
    assert mine() == before


ENDS = """
import sys, torch
from vime_sync import Publisher, WeightSource, shared_empty
tensors = {"t": torch.zeros(8), "shared": shared_empty(8, torch.float32)}
publishers = [Publisher(WeightSource.from_tensors(tensors), name) for name in ("shm", "collective")]
print(*(p.manifest()["sources"][0]["control"]["segment"] for p in publishers))
raise SystemExit(3)
"""


def test_a_trainer_that_ends_without_closing_leaves_nothing_and_keeps_its_exit_status():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr  # and is not aborted for a thread that still waits
    first, _ = done.stdout.split()
    assert list(SHM.glob(first.rpartition("-")[0] + "-*")) == []


def test_a_forked_child_does_not_give_its_parents_memory_up():
    with Publisher(WeightSource.from_tensors({"t": torch.zeros(8)})) as publisher:
        names = mine()
        child = os.fork()
        if child == 0:
            publisher._exporter._segment.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert mine() == names


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two users, whose files are safe from each other")
def test_what_another_users_trainer_left_stops_nobody(monkeypatch):
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        Path(folder).chmod(0o1777)  # as /dev/shm itself, which others sweep meanwhile
        monkeypatch.setattr(control, "SHM", Path(folder))
        *head, pid, start, token = segment_name().split("-")
        left = Path(folder, "-".join([*head, str(2**22 + int(pid)), start, token]))  # no process has such an id
        left.touch()
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            status = 1
            try:
                status = control.sweep()
            finally:
                os._exit(status)  # pytest's own handlers stay out of the child
        assert os.waitpid(child, 0)[1] == 0
        assert left.exists()
        assert control.sweep() == 1
        assert not left.exists()


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["disk", "delta"])
def test_a_folder_in_which_an_earlier_trainer_went_further(engines, trainers, tmp_path, name):
    earlier = trainers(checkpoint(1), name, options={"folder": tmp_path})
    for version in (7, 8, 9):
        earlier.publisher.stage(version)
    folder = tmp_path / "rank-00000"
    (folder / ".0000000010.partial").mkdir()  # where it died
    trainer, engine = trainers(checkpoint(2), name, options={"folder": tmp_path}), engines()
    session, before = trainer.session(engine), engine.content()
    with pytest.raises(StaleSourceError, match="another trainer's"):
        session.update(9)
    assert engine.content() == before
    trainer.publisher.stage(3)
    assert sorted(path.name for path in folder.iterdir()) == [f"{3:010d}"]
    session.update(3)
    assert engine.content() == content_of(2)
    with pytest.raises(StaleSourceError, match="another trainer's"):
        earlier.session(engines()).update(3)


def test_a_delta_that_was_not_sealed_is_no_base_and_nothing_is_its_own(tmp_path):
    elements = torch.zeros(1000)
    source = WeightSource.from_tensors({f"t{i}": t for i, t in enumerate(elements.unbind())})
    with Publisher(source, "delta", options={"folder": tmp_path}) as publisher:
        publisher.stage(1)
        elements[7] = 1
        with no_file_larger_than(4096), pytest.raises(TransportError, match="could not be written"):
            publisher.stage(2)  # the delta fits, its thousand digests do not
        elements[8] = 2
        publisher.stage(3)
        needed = {(0, name) for name in source.buffers}
        importer = make_importer("delta", publisher.manifest()["sources"], needed, torch.device("cpu"))
        (buffer,) = importer.open().values()
        importer.fetch(3)
        assert torch.equal(buffer, elements)
        elements[9] = 3
        publisher.stage(3)  # once more, as for a retry: nothing is its own base
        importer._held.clear()
        importer.fetch(3)
        assert torch.equal(buffer, elements)


# -- ports ------------------------------------------------------------------------------------------------------------


def test_a_collective_that_was_closed_is_refused_at_once(trainers):
    trainer = trainers(checkpoint(1), "collective", options={"deadline_s": 120.0})
    sources = trainer.publisher.manifest()["sources"]
    needed = {(0, name) for name in trainer.publisher.source.buffers}
    trainer.publisher.close()
    started = time.monotonic()
    with pytest.raises(StaleSourceError, match="does not answer"):
        make_importer("collective", sources, needed, torch.device("cpu")).open()
    assert time.monotonic() - started < 60
