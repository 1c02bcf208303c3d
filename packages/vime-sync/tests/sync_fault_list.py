"""The scenes: one function a fault. See `sync_fault_scene` for what is done around each."""

import asyncio
import os
import threading
from pathlib import Path

import torch
from sync_fault_scene import scenario, seen
from vime_sync import Publisher, WeightSource
from vime_sync.errors import EngineError

TRAINER, CONTROLLER, WORKER = (
    "Trainer killed (kill -9)",
    "Controller killed (kill -9)",
    "Engine worker killed (kill -9)",
)
SERVER, MESSAGES, BYTES = "Engine server killed (kill -9)", "Messages", "Bytes and memory"
PAIR = (("here", 1), ("here", 2))
MIXED = (("here", 1), ("process", 2))


# -- trainer ----------------------------------------------------------------------------------------------------------


@scenario(TRAINER, "before it staged", trainer="process")
def _(scene):
    scene.kill_trainer()
    return scene.update()


@scenario(TRAINER, "in the middle of staging", trainer="process")
def _(scene):
    scene.stage(2, 2, die=True)
    return scene.update()


for mode in ("shadow", "undo", "direct"):

    @scenario(TRAINER, f"staged, before the update ({mode})", trainer="process", mode=mode)
    def _(scene):
        scene.stage(2, 2)
        scene.kill_trainer()
        return scene.update()

    @scenario(TRAINER, f"between stage and commit, two engines ({mode})", trainer="process", mode=mode, engines=PAIR)
    def _(scene):
        scene.stage(2, 2)
        before_commit(scene, scene.kill_trainer)
        return scene.update()


def before_commit(scene, run):
    """Run something when all engines have staged and none has been told to commit."""
    real = scene.session._commit

    def commit(version, staged):
        run()
        return real(version, staged)

    scene.session._commit = commit


# -- controller -------------------------------------------------------------------------------------------------------

for op, when, words in (
    ("connect", "before", "before it connects"),
    ("connect", "after", "after it connected"),
    ("stage", "before", "before it asks to stage"),
    ("stage", "after", "after an engine staged"),
    ("commit", "before", "all staged, before it asks to commit"),
    ("commit", "between", "after the first of two engines committed"),
    ("commit", "after", "after both have committed, before it says so"),
):

    @scenario(CONTROLLER, f"{words}, two engines", engines=PAIR)
    def _(scene, op=op, when=when):
        scene.stage(2, 2)
        return scene.controller(op=op, when=when, engine=1 if op == "commit" and when != "before" else None)


@scenario(CONTROLLER, "after it asked for the whole update, one engine")
def _(scene):
    scene.stage(2, 2)
    return scene.controller(op="update", when="after")


# -- engine -----------------------------------------------------------------------------------------------------------

for op, when, words in (
    ("connect", "before", "before it plans"),
    ("connect", "after", "planned, before it answers"),
    ("stage", "before", "before it stages"),
    ("stage", "after", "staged, before it answers"),
    ("commit", "before", "before it writes"),
    ("commit", "middle", "in the middle of writing"),
    ("commit", "after", "written, before it answers"),
    ("confirm", "before", "before it is told that all have written"),
    ("confirm", "after", "told so, before it answers"),
):

    @scenario(WORKER, f"one of two workers, {words}; another engine", engines=MIXED)
    def _(scene, op=op, when=when):
        scene.stage(2, 2)
        scene.engines[1].plant(rank=1, op=op, when=when, do="kill")
        return scene.update() if op != "connect" else seen(lambda: scene.connect(takeover=True))


for op, words in (("connect", "before it plans"), ("stage", "before it stages"), ("commit", "before it writes")):

    @scenario(SERVER, f"{words}; another engine", engines=MIXED)
    def _(scene, op=op):
        scene.stage(2, 2)
        scene.engines[1].plant(op=op, when="before", do="kill")
        return scene.update() if op != "connect" else seen(lambda: scene.connect(takeover=True))


# -- messages ---------------------------------------------------------------------------------------------------------


def lose(engine, op, *, answer):
    """Lose a request on its way, or the answer to one."""
    real = engine.call

    def call(operation, body=None):
        if operation != op:
            return real(operation, body)
        if answer:
            real(operation, body)
        engine.call = real
        raise EngineError("an engine did not answer in time", where=op)

    engine.call = call


for op, answer in (("stage", False), ("stage", True), ("commit", False), ("commit", True)):

    @scenario(MESSAGES, f"{op}: {'answer' if answer else 'request'} of one of two engines lost", engines=PAIR)
    def _(scene, op=op, answer=answer):
        scene.stage(2, 2)
        lose(scene.session._engines[1], op, answer=answer)
        return scene.update()


@scenario(MESSAGES, "update: request lost, one engine")
def _(scene):
    scene.stage(2, 2)
    lose(scene.session._engines[0], "update", answer=False)
    return scene.update()


@scenario(MESSAGES, "update: answer lost, one engine")
def _(scene):
    scene.stage(2, 2)
    lose(scene.session._engines[0], "update", answer=True)
    return scene.update()


for op in ("connect", "stage", "commit", "abort", "update"):

    @scenario(MESSAGES, f"{op} sent twice")
    def _(scene, op=op):
        scene.stage(2, 2)
        engine = scene.session._engines[0]
        body = scene.session._body(engine, 2)
        if op == "connect":
            scene.session.connect()
            scene.session.connect()
            return scene.update()
        if op == "abort":
            engine.call("stage", body)
            scene.session.abort()
            scene.session.abort()
            return "success"
        if op in ("commit", "stage"):
            engine.call("stage", body)
        if op == "commit":
            engine.call("commit", body)
        if op == "update":
            engine.call("update", body)
        return seen(lambda: engine.call(op, body))


@scenario(MESSAGES, "an old update arrives late")
def _(scene):
    scene.stage(2, 2)
    late = scene.session._body(scene.session._engines[0], 2)
    scene.update()
    return seen(lambda: scene.session._engines[0].call("update", late))


@scenario(MESSAGES, "two updates at once")
def _(scene):
    scene.stage(2, 2)
    engine = scene.session._engines[0]
    gate, second = threading.Event(), []
    server = scene.engines[0].sync

    async def pause(mode):
        second.append(await server.handle("update", scene.session._body(engine, 2)))
        scene.engines[0].control.paused = True
        gate.set()

    scene.engines[0].control.pause = pause
    first = scene.update()
    return f"{first}; the second {second[0]['error']}"


@scenario(MESSAGES, "an update of a version that is not staged")
def _(scene):
    scene.stage(3, 2)
    return scene.update(2)


@scenario(MESSAGES, "an update from a wrong base version")
def _(scene):
    scene.stage(2, 2)
    scene.session._engines[0].version = 0
    return scene.update(2)


@scenario(MESSAGES, "requests that a commit waits for outlast the deadline")
def _(scene):
    scene.stage(2, 2)
    hurry(scene.session, 1.0)
    scheduler = scene.engines[0].control

    async def drain(mode):
        scheduler.paused = True  # nothing new is scheduled, and what runs goes on and on
        await asyncio.sleep(60)

    scheduler.pause = drain
    outcome = scene.update()
    del scheduler.pause
    return outcome


def hurry(session, deadline_s):
    """A shorter deadline, once all is connected: a busy machine may need more than that to come so far."""
    session._deadline = deadline_s
    for engine in session._engines:
        engine._http.timeout = deadline_s


for op in ("stage", "commit"):

    @scenario(MESSAGES, f"a worker hangs in {op} past the deadline", engines=(("process", 1),))
    def _(scene, op=op):
        scene.stage(2, 2)
        hurry(scene.session, 1.0)
        scene.engines[0].plant(rank=0, op=op, when="before", do="hang", seconds=5)
        return scene.update()


# -- bytes ------------------------------------------------------------------------------------------------------------


def segment(scene):
    return scene.publisher._exporter._segment.name


for mode in ("shadow", "undo", "direct"):

    @scenario(BYTES, f"a published byte is flipped ({mode})", mode=mode)
    def _(scene):
        scene.stage(2, 2)
        scene.publisher._exporter._segment.tensor(torch.uint8, 4)[1] ^= 64
        return scene.update()

    @scenario(BYTES, f"a write into live memory fails half-way ({mode})", mode=mode)
    def _(scene):
        scene.stage(2, 2)
        scene.engines[0].plant(rank=0, op="commit", when="middle", do="raise")
        outcome = scene.update()
        scene.engines[0].control.hook = None
        return outcome

    @scenario(BYTES, f"the trainer goes on writing while an engine reads ({mode})", mode=mode)
    def _(scene, op="stage" if mode == "shadow" else "commit"):
        scene.stage(2, 2)
        scene.engines[0].plant(rank=0, op=op, when="middle", do="scribble")
        outcome = scene.update()
        scene.engines[0].control.hook = None
        return outcome


@scenario(BYTES, "the publisher closed")
def _(scene):
    scene.stage(2, 2)
    scene.publisher.close()
    return scene.update()


@scenario(BYTES, "the segment is truncated before the engine opens it")
def _(scene):
    scene.stage(2, 2)
    os.truncate(Path("/dev/shm") / segment(scene), 100)
    return seen(lambda: scene.connect(takeover=True))


@scenario(BYTES, "the segment is truncated after the engine opened it")
def _(scene):
    scene.stage(2, 2)
    os.truncate(Path("/dev/shm") / segment(scene), 100)
    return scene.update()


@scenario(BYTES, "a stale handle: the manifest of a trainer that restarted")
def _(scene):
    scene.publisher.close()
    return seen(lambda: scene.connect(takeover=True))


@scenario(BYTES, "shared memory is exhausted when a trainer publishes")
def _(scene):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # the allocation of a larger segment really fails
    try:
        return seen(lambda: Publisher(WeightSource.from_tensors({"norm.weight": torch.zeros(1 << 20)})))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
