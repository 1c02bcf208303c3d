"""Processes that can be killed: engines whose workers are processes, trainers and controllers.

They are forked by multiprocessing's fork server, which has imported everything once, and are spoken to in JSON. A fault
is planted in the process that is to suffer it and strikes at a named message boundary:

``{"op": "commit", "when": "before" | "middle" | "after", "do": "kill" | "raise" | "hang" | "scribble" | "tear"}``
"""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
from sync_fake_engine import FakeControl, FakeModel, checkpoint, make_app
from torch.utils._python_dispatch import TorchDispatchMode
from vime_sync import Publisher, SyncSession, WeightSource
from vime_sync.errors import EngineError, SyncError, to_wire
from vime_sync.receiver import Receiver

HERE = str(Path(__file__).parent)


def warm():
    """Import what a first plan and a first digest import lazily, once, before processes are forked."""
    from vime_sync.digest import digest_tensor
    from vime_sync.layout import CheckpointTensor, Piece, Region, contiguous_strides, whole
    from vime_sync.model import plan_model

    torch.set_num_threads(1)
    described = []
    for name, tensor in checkpoint(0).items():
        shape = tuple(tensor.shape)
        piece = Piece(whole(shape), Region(0, "b", 0, shape, contiguous_strides(shape)))
        described.append(CheckpointTensor(name, shape, tensor.dtype, (piece,)))
        digest_tensor(tensor, name)
    plan_model(FakeModel(), described)


warm()


def die_with_parent():
    """End this process when its parent ends, however that comes about (PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def context():
    """The fork server, with what the children need already imported."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["sync_fault_lab"])
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = HERE if known is None else f"{HERE}:{known}"
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        if known is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = known
    return made


def suffer(fault, receiver=None):
    """Do to this process what the fault says."""
    if fault["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["do"] == "hang":
        time.sleep(fault["seconds"])
    if fault["do"] == "raise":
        raise RuntimeError("an ECC error, say")
    if fault["do"] == "scribble":  # the trainer goes on training while an engine still reads
        (control,) = receiver._link.controls.values()
        name = control.name
        with (Path("/dev/shm") / name).open("r+b") as file:
            file.seek(16)
            sequence = int.from_bytes(file.read(8), "little")
            file.seek(16)
            file.write((sequence + 2).to_bytes(8, "little"))


class Interrupt(TorchDispatchMode):
    """Strikes in the middle of a copy of many tensors."""

    def __init__(self, fault, receiver, at=4):
        super().__init__()
        self.fault, self.receiver, self.left = fault, receiver, at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.left -= 1
            if self.left == 0:
                suffer(self.fault, self.receiver)
        return func(*args, **(kwargs or {}))


def handle(receiver, message, fault):
    """A receiver's answer, with a fault at its boundary."""
    struck = fault if fault and fault["op"] == message.get("op") else None
    if struck and struck["when"] == "before":
        suffer(struck, receiver)
    if struck and struck["when"] == "middle":
        with Interrupt(struck, receiver):
            reply = receiver.handle(message)
    else:
        reply = receiver.handle(message)
    if struck and struck["when"] == "after":
        suffer(struck, receiver)
    return reply


def worker_main(pipe, rank, world):
    """An engine worker in its own process."""
    die_with_parent()
    torch.set_num_threads(1)
    model = FakeModel(rank, world)
    receiver, fault = Receiver(model), None
    while True:
        message = json.loads(pipe.recv_bytes())
        if "fault" in message:
            fault, reply = message["fault"], {}
        elif "content" in message:
            reply = {"content": model.content()}
        else:
            reply = handle(receiver, message, fault)
        pipe.send_bytes(json.dumps(reply).encode())


class ProcessControl(FakeControl):
    """Workers as processes; as in vLLM, the engine is dead when one of them is."""

    def __init__(self, world):
        super().__init__([])
        self.dead, self.fault = "", None
        fork = multiprocessing.get_context("fork")
        self.pipes, self.children = [], []
        for rank in range(world):
            ours, theirs = fork.Pipe()
            self.children.append(fork.Process(target=worker_main, args=(theirs, rank, world), daemon=True))
            self.children[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def _ask(self, message, deadline):
        if self.dead:
            raise EngineError("the engine is dead", seen=self.dead)
        end = time.monotonic() + deadline / 2  # the workers' deadline ends before the request's
        try:
            for pipe in self.pipes:
                pipe.send_bytes(json.dumps(message).encode())
            replies = []
            for pipe in self.pipes:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    self.dead = "a worker does not answer"
                    raise EngineError("the engine's workers did not answer", where=str(message.get("op")))
                replies.append(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError) as cause:
            self.dead = "a worker died"
            raise EngineError("the engine's workers did not answer", seen=self.dead) from cause
        return replies

    async def workers(self, message, deadline):
        fault = self.fault
        if fault and fault["op"] == message.get("op") and fault["when"] == "before":
            suffer(fault)
        replies = await asyncio.to_thread(self._ask, message, deadline)
        if fault and fault["op"] == message.get("op") and fault["when"] == "after":
            suffer(fault)
        return replies

    async def contents(self):
        return [reply["content"] for reply in await self.workers({"content": True}, 10.0)]


def engine_main(pipe, world, port):
    """An engine's server process."""
    die_with_parent()
    import uvicorn
    from fastapi import Request

    torch.set_num_threads(1)
    control = ProcessControl(world)
    app = make_app(control)

    @app.post("/fault")
    async def plant(raw: Request):
        body = await raw.json()
        if body["rank"] is None:
            control.fault = body["fault"]
        else:
            pipe = control.pipes[body["rank"]]
            pipe.send_bytes(json.dumps({"fault": body["fault"]}).encode())
            await asyncio.to_thread(pipe.recv_bytes)

    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    pipe.send_bytes(b"{}")
    server.run()


def trainer_main(pipe):
    """A trainer rank: loads and stages on command."""
    die_with_parent()
    torch.set_num_threads(1)
    tensors = checkpoint(1)
    publisher = Publisher(WeightSource.from_tensors(tensors))
    pipe.send_bytes(json.dumps(publisher.manifest()).encode())
    while True:
        command = json.loads(pipe.recv_bytes())
        for name, tensor in checkpoint(command["seed"]).items():
            tensors[name].copy_(tensor)
        if command.get("die"):
            publisher._control.begin()
            os.kill(os.getpid(), signal.SIGKILL)
        publisher.stage(command["version"])
        pipe.send_bytes(b"{}")


class Doomed(Exception):
    """Raised in a controller in place of an answer that never arrived."""


def strike(session, op, when, engine=None):
    """Kill this process before or after a request to `engine` (None: to any), which comes last among several."""
    for index, target in enumerate(session._engines):
        real = target.call

        def call(operation, body=None, real=real, index=index):
            if operation == op and when == "before" and engine in (None, index):
                os.kill(os.getpid(), signal.SIGKILL)
            if operation == op and index == engine:
                time.sleep(0.7)  # the other engine has answered by now
                if when == "between":
                    os.kill(os.getpid(), signal.SIGKILL)
            reply = real(operation, body)
            if operation == op and when == "after" and engine in (None, index):
                os.kill(os.getpid(), signal.SIGKILL)
            return reply

        target.call = call


def controller_main(pipe, urls, manifest, version, options, fault):
    """A driver: connects and updates, and dies where it is told to."""
    die_with_parent()
    session = SyncSession(urls, manifest, deadline_s=20, takeover=True, **options)
    strike(session, fault["op"], fault["when"], fault.get("engine"))
    try:
        session.connect()
        session.update(version)
        pipe.send_bytes(b"{}")
    except SyncError as error:
        pipe.send_bytes(json.dumps(to_wire(error)).encode())
