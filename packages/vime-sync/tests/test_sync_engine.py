"""The same guarantees on a real vLLM server on the CPU: tiny Qwen3, tied embeddings, padded vocabulary.

vLLM's own weight checker (SHA-256 of every live parameter) is the judge of the bytes: what vLLM loaded itself from
checkpoint A must come back, bit for bit, after B and then A were synced.
"""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import sync_fault_lab as lab
import torch
from sync_models import DENSE, checkpoint
from vime_sync import (
    DigestError,
    EngineError,
    IncompletePlanError,
    NotPausedError,
    Publisher,
    SecondTrainerError,
    StaleSourceError,
    SyncSession,
    TornEngineError,
    UnknownNameError,
    VersionConflictError,
    WeightSource,
)
from vime_sync.verify import compare

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TIED = DENSE | {"tie_word_embeddings": True, "vocab_size": 100}  # as in conftest.py, where the server is started
PROMPT = tuple(5 + i % 60 for i in range(70))


@pytest.fixture(scope="module")
def server(booting):
    """A server that has loaded checkpoint 0 by its own means."""
    return booting.ready()


@pytest.fixture
def engine(server, trainers):
    """The server, serving checkpoint 0 under the next version: the tests run in any order."""
    version = max(state(server)["version"], 0) + 1
    trainer = trainers(checkpoint(TIED, 0))
    trainer.publisher.stage(version)
    with trainer.session(server, takeover=True) as session:
        session.update(version)
    server.version = version
    return server


def state(server):
    return httpx.get(f"{server.url}/vime/state", timeout=20).json()


def checksums(server):
    return server.post("/weight_checker", action="checksum").json()["checksums"]


def cache_hits(server):
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    return sum(float(v) for v in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE))


def synced(server, trainer, seed, **options):
    """Sync a checkpoint as the next version."""
    version = max(state(server)["version"], trainer.publisher.version) + 1
    trainer.load(checkpoint(TIED, seed))
    trainer.publisher.stage(version)
    with trainer.session(server, **options) as session:
        return session.update(version)


@pytest.mark.parametrize("mode", ["shadow", "undo", "direct"])
def test_live_weights_are_bitwise_those_that_vllm_loads(engine, server, trainers, mode):
    loaded, tokens = checksums(server), server.generate()
    trainer = trainers(checkpoint(TIED, 1))
    report = synced(server, trainer, 1, mode=mode)
    changed, other = checksums(server), server.generate()
    assert changed.keys() == loaded.keys()
    assert [name for name in loaded if loaded[name] == changed[name]] == []
    assert other["token_ids"] != tokens["token_ids"]
    assert other["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 12}]
    assert (report.mode, report.digest_mode, len(report.digest)) == (mode, "full", 32)
    synced(server, trainer, 0, mode=mode)
    again = server.generate()
    assert checksums(server) == loaded
    assert again["token_ids"] == tokens["token_ids"]
    assert again["weight_versions"][0]["version"] == str(report.version + 1)


@pytest.mark.parametrize("transport", ["disk", "delta", "collective"])
def test_other_transports_bring_the_same_bytes(engine, server, trainers, tmp_path, transport):
    loaded = checksums(server)
    options = {} if transport == "collective" else {"folder": tmp_path}
    trainer = trainers(checkpoint(TIED, 0), transport, options=options)
    synced(server, trainer, 1)
    assert [name for name, value in checksums(server).items() if value == loaded[name]] == []
    assert synced(server, trainer, 0).transport == transport
    assert checksums(server) == loaded


def test_the_first_sync_equals_what_vllm_loaded(server, make_model, trainers):
    """`engine` syncs checkpoint 0 over checkpoint 0: the digest of live bytes is that of the folder."""
    trainer = trainers(checkpoint(TIED, 0))
    first = synced(server, trainer, 0, takeover=True)
    assert first.bytes > 0
    assert state(server)["digest"] == first.digest
    same = compare(server.url, WeightSource.from_tensors(checkpoint(TIED, 0)), deadline_s=20)
    other = compare(server.url, WeightSource.from_tensors(checkpoint(TIED, 1)), deadline_s=20)
    assert (same.equal, same.unread, same.digest) == (True, (), first.digest)
    assert len(other.differing) == len(same.matching)


def test_a_cached_prefix_is_dropped_with_the_weights(engine, server, trainers):
    server.generate(PROMPT)
    before = cache_hits(server)
    server.generate(PROMPT)
    assert cache_hits(server) > before
    trainer = trainers(checkpoint(TIED, 2))
    synced(server, trainer, 2)
    before, fresh = cache_hits(server), server.generate(PROMPT)
    assert cache_hits(server) == before
    synced(server, trainer, 1)
    synced(server, trainer, 2)
    assert server.generate(PROMPT)["token_ids"] == fresh["token_ids"]


def failing(server, error, match, run):
    """Run what must fail by name; the engine goes on with the same bytes, tokens and version."""
    sums, tokens, version = checksums(server), server.generate(), state(server)["version"]
    with pytest.raises(error, match=match):
        run()
    after = server.generate()
    assert checksums(server) == sums
    assert after["token_ids"] == tokens["token_ids"]
    assert (after["weight_versions"], state(server)["version"]) == (tokens["weight_versions"], version)


@pytest.mark.parametrize("mode", ["shadow", "undo"])
def test_wrong_bytes_leave_the_tokens_unchanged_and_say_so(engine, server, trainers, mode):
    trainer = trainers(checkpoint(TIED, 1))
    version = server.version + 1
    trainer.publisher.stage(version)
    trainer.publisher._exporter._segment.tensor(torch.uint8, 4)[1] ^= 64
    session = trainer.session(server, mode=mode)
    failing(server, DigestError, "not those that were published", lambda: session.update(version))


def test_guards_on_the_real_engine(engine, server, trainers):
    tensors, version = checkpoint(TIED, 1), server.version + 1

    def attempt(named, at=version, **options):
        trainer = trainers(named)
        trainer.publisher.stage(at)

        def run():
            with trainer.session(server, **options) as session:
                session.update(at)

        return run

    failing(server, UnknownNameError, "surprise", attempt(tensors | {"model.layers.0.surprise.weight": torch.ones(2)}))
    missing = {n: t for n, t in tensors.items() if "k_proj" not in n}
    failing(server, IncompletePlanError, "qkv_proj", attempt(missing))
    failing(server, VersionConflictError, "not newer", attempt(tensors, at=server.version))
    failing(server, NotPausedError, "generating", attempt(tensors, in_flight="paused"))


def test_a_second_trainer_is_refused(engine, server, trainers):
    first, second = trainers(checkpoint(TIED, 1)), trainers(checkpoint(TIED, 2))
    with first.session(server):
        failing(server, SecondTrainerError, "takeover", second.session(server).connect)


def test_a_torn_engine_refuses_and_recovers(engine, server, trainers):
    trainer = trainers(checkpoint(TIED, 1))
    version = server.version + 1
    trainer.publisher.stage(version)
    trainer.publisher._exporter._segment.tensor(torch.uint8, 4)[1] ^= 64
    with trainer.session(server, mode="direct") as session:
        with pytest.raises(TornEngineError):
            session.update(version)
        for path, body in (("/inference/v1/generate", {"token_ids": [5]}), ("/resume", {})):
            response = server.post(path, **body)
            assert (response.status_code, response.json()["error"]) == (503, "TornEngineError")
        assert state(server)["state"] == "torn"
        trainer.load(checkpoint(TIED, 0))
        trainer.publisher.stage(version + 1)
        session.update(version + 1)
    assert server.generate()["weight_versions"][0]["version"] == str(version + 1)


def doomed_trainer(pipe, version, staged):
    """A trainer process that is killed in the middle of staging, or when it has staged."""
    lab.die_with_parent()
    publisher = Publisher(WeightSource.from_tensors(checkpoint(TIED, 1)))
    pipe.send_bytes(json.dumps(publisher.manifest()).encode())
    pipe.recv_bytes()
    if staged:
        publisher.stage(version)
    else:
        publisher._control.begin()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("staged", [False, True])
def test_a_trainer_killed_on_the_way(engine, server, staged):
    """As the table of faults says: the old version, or a whole new one."""
    version, fork = server.version + 1, lab.context()
    pipe, theirs = fork.Pipe()
    process = fork.Process(target=doomed_trainer, args=(theirs, version, staged))
    process.start()
    theirs.close()
    with SyncSession([server.url], json.loads(pipe.recv_bytes()), deadline_s=20) as session:
        pipe.send_bytes(b"go")
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
        if staged:
            session.update(version)
            assert server.generate()["weight_versions"][0]["version"] == str(version)
        else:
            failing(server, StaleSourceError, "middle of a write", lambda: session.update(version))


def test_a_request_in_flight_is_split_by_version(engine, server, trainers):
    """Frozen at the commit and continued with the new weights; every token says which weights made it."""
    import concurrent.futures

    trainer, spans = trainers(checkpoint(TIED, 1)), []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for attempt in range(20):  # an update may come before the first token, or after the last
            committed = [str(state(server)["version"])]
            running = pool.submit(server.generate, (5, 6, 7), 110)
            while not running.done():
                committed.append(str(synced(server, trainer, attempt % 2).version))
            spans = running.result(120)["weight_versions"]
            if len(spans) > 1:
                break
    assert len(spans) > 1
    assert [s["version"] for s in spans] == [v for v in committed if v in {s["version"] for s in spans}]
    assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, 110)


def test_a_pause_that_its_deadline_cut_off_is_taken_back(engine, server, trainers):
    trainer, late = trainers(checkpoint(TIED, 0)), False
    session = trainer.session(server, in_flight="wait", takeover=True)
    session.connect()
    client = session._engines[0]
    with ThreadPoolExecutor(1) as pool:
        for attempt in range(20):  # the request may be over before it could be waited for
            trainer.publisher.stage(client.version + 1)
            body = session._body(client, client.version + 1)
            client.call("stage", body)
            answer = pool.submit(server.generate, PROMPT[:20], 100)
            time.sleep(0.01 * attempt)
            try:
                client.call("commit", body | {"deadline_s": 0.1})
                client.version += 1
            except EngineError as error:
                late = "did not finish in time" in str(error)
            assert len(answer.result(60)["token_ids"]) == 100
            if late:
                break
    assert late
    assert not state(server)["paused"]
    server.generate()  # whoever comes now is answered
    client.call("commit", body)
    assert server.generate()["weight_versions"][0]["version"] == str(body["version"])


def test_the_four_phase_routes_of_vllm_work_too(engine, server, trainers):
    trainer = trainers(checkpoint(TIED, 3))
    version = server.version + 1
    trainer.publisher.stage(version)
    session = SyncSession([server.url], trainer.publisher.manifest(), deadline_s=20)
    link = {"session": session._id, "manifest": trainer.publisher.manifest(), "takeover": True}
    server.post("/pause").raise_for_status()
    try:
        server.post("/init_weight_transfer_engine", init_info={"message": link}).raise_for_status()
        server.post("/start_weight_update").raise_for_status()
        step = {"session": session._id, "version": version, "base": server.version}
        server.post("/update_weights", update_info={"message": step}).raise_for_status()
        server.post("/finish_weight_update", weight_version=str(version)).raise_for_status()
    finally:
        server.post("/resume").raise_for_status()
        session.close()
    assert server.generate()["weight_versions"][0]["version"] == str(version)
    assert state(server)["version"] == version
