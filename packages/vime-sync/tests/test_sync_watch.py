"""An engine on a trainer's memory watches the trainer: who really died, what is served then, what the guard says."""

import asyncio
import json
import os
import signal

import pytest
import sync_fault_lab as lab
from sync_alias import AliasTrainer, let_go, on_memory
from sync_fake_engine import FakeControl, FakeModel, content_of
from vime_sync.errors import EngineError
from vime_sync.process import identity
from vime_sync.vllm_plugin.guard import ServeGuard
from vime_sync.vllm_plugin.routes import SyncServer
from vime_sync.vllm_plugin.watch import watch_trainers

PERIOD_S = 0.01


@pytest.fixture
def child():
    """A function that forks a process which runs a target; all are ended after the test."""
    started = []

    def fork(target, *arguments):
        ours, theirs = lab.context().Pipe()
        process = lab.context().Process(target=target, args=(theirs, *arguments))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield fork
    for process in started:
        process.kill()
        process.join(20)


def trainer_main(pipe):
    """A trainer with memory that an engine can run on; it waits to be killed."""
    lab.die_with_parent()
    trainer = AliasTrainer()
    pipe.send_bytes(json.dumps(trainer.manifest).encode())
    pipe.recv_bytes()


def controller_main(pipe):
    """Who drives a session; says who it is and waits to be killed."""
    lab.die_with_parent()
    pipe.send_bytes(json.dumps(identity()).encode())
    pipe.recv_bytes()


def end(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)


async def answer(server, path, method="POST"):
    """What the guard lets a client see: a status and a body."""
    sent = []

    class State:
        vime_sync = server

    async def app(scope, receive, send):
        if scope["path"] == "/wake_up":
            server.engine.paused = False  # as vLLM does
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message):
        sent.append(message)

    await ServeGuard(app, State())({"type": "http", "method": method, "path": path}, None, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_an_engine_whose_trainer_was_killed_serves_no_more(child):
    process, pipe = child(trainer_main)
    control = FakeControl([on_memory(FakeModel(), json.loads(pipe.recv_bytes()))])
    server = SyncServer(control)
    watch = asyncio.create_task(watch_trainers(server, PERIOD_S))
    await asyncio.sleep(5 * PERIOD_S)
    assert not watch.done()
    assert (await answer(server, "/v1/completions"))[0] == 200
    await asyncio.to_thread(end, process)
    await asyncio.wait_for(watch, 60)
    status, body = await answer(server, "/inference/v1/generate")
    assert (status, body["error"]) == (503, "TornEngineError")
    assert f"{process.pid}" in body["seen"]
    assert control.paused
    assert control.modes[-1] == "abort"
    later = await server.handle("state", {})
    assert (later["state"], later["torn"]) == ("torn", server.torn)  # and no later operation takes it back
    let_go(control)


async def test_an_engine_with_weights_of_its_own_is_not_watched():
    await asyncio.wait_for(watch_trainers(SyncServer(FakeControl([FakeModel()])), PERIOD_S), 60)


async def test_a_watch_that_cannot_learn_whom_to_watch_says_so(caplog):
    control = FakeControl([FakeModel()])

    async def lost(message, deadline):
        raise EngineError("the engine's workers did not answer")

    control.hook = lost
    await asyncio.wait_for(watch_trainers(SyncServer(control), PERIOD_S), 60)
    assert "the trainer is not watched" in caplog.text


async def opened(owner):
    """An engine that `owner` has opened for writing version 1."""
    trainer = AliasTrainer()
    server = SyncServer(trainer.control())
    link = {"session": "s", "owner": owner, "manifest": trainer.manifest}
    assert (await server.handle("connect", link))["ok"]
    assert (await server.handle("open", {"session": "s", "version": 1}))["ok"]
    assert server.engine.paused
    return trainer, server


@pytest.mark.parametrize("wrote", [False, True])
async def test_a_block_whose_controller_was_killed_is_given_up(child, wrote):
    process, pipe = child(controller_main)
    trainer, server = await opened(json.loads(pipe.recv_bytes()))
    if wrote:
        trainer.publisher._control.begin()
    watch = asyncio.create_task(watch_trainers(server, PERIOD_S))
    await asyncio.to_thread(end, process)

    async def given_up():
        while server.opened_by is not None or server._busy:
            await asyncio.sleep(PERIOD_S)

    await asyncio.wait_for(given_up(), 60)
    status, body = await answer(server, "/v1/completions")
    if wrote:
        assert (status, server.engine.paused) == (503, True)
        assert "gave up" in body["seen"]
    else:
        assert (status, server.engine.paused) == (200, False)
        assert await server.engine.contents() == content_of(1)
    watch.cancel()
    let_go(server.engine)
    trainer.close()


async def test_waking_a_torn_engine_lets_nothing_be_sampled():
    """vLLM resumes its scheduler when it is awake: what was frozen must be gone before, and it must pause again."""
    server = SyncServer(FakeControl([FakeModel()]))
    server.engine.paused = True
    server.refusal = "version 3 failed while it was being written"
    assert (await answer(server, "/wake_up"))[0] == 200
    assert server.engine.paused
    assert server.engine.modes == ["abort", "keep"]
    assert (await answer(server, "/sleep"))[0] == 200
    assert (await answer(server, "/resume"))[0] == 503
    assert (await answer(server, "/health", "GET"))[0] == 200


async def test_no_one_resumes_in_the_middle_of_a_commit():
    server = SyncServer(FakeControl([FakeModel()]))
    server.writing = "version 3 is being committed"
    for path in ("/resume", "/wake_up"):
        status, body = await answer(server, path)
        assert (status, body["error"], body["seen"]) == (409, "AlreadyStartedError", "version 3 is being committed")
    assert (await answer(server, "/v1/completions"))[0] == 200  # it waits in the paused scheduler
