"""A small engine: real receivers, real routes, real HTTP; only the model and the scheduler are made up.

The model has what makes weight loading hard: fused and sharded projections, an embedding padded to whole shards, an
output head tied to it, stacked experts, a constant buffer. It says exactly which bytes it serves (`FakeModel.content`).
Workers may live in the server's process or each in its own, so that one can be killed.
"""

import asyncio
import hashlib
import socket
import threading
import time

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vime_sync.errors import EngineError
from vime_sync.receiver import Receiver
from vime_sync.vllm_plugin.routes import SyncEndpoints, SyncServer
from vime_sync.vllm_plugin.watch import watch_trainers

HEADS, KV, DIM, HIDDEN, INNER, EXPERTS, LAYERS, WORDS = 4, 2, 4, 8, 12, 2, 2, 10


def checkpoint(seed, dtype=torch.float32, drop=(), words=WORDS):
    """Random weights under HF-like names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (words, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        shapes |= {
            at + "q_proj.weight": (HEADS * DIM, HIDDEN),
            at + "k_proj.weight": (KV * DIM, HIDDEN),
            at + "v_proj.weight": (KV * DIM, HIDDEN),
            at + "o_proj.weight": (HIDDEN, HEADS * DIM),
            at + "norm.weight": (HIDDEN,),
        }
        for expert in range(EXPERTS):
            shapes |= {
                f"{at}experts.{expert}.gate_proj.weight": (INNER, HIDDEN),
                f"{at}experts.{expert}.up_proj.weight": (INNER, HIDDEN),
                f"{at}experts.{expert}.down_proj.weight": (HIDDEN, INNER),
            }
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items() if n not in drop}


class FakeModel:
    """One worker's shard; see the module's text."""

    def __init__(self, rank=0, world=1, dtype=torch.float32, seed=0):
        self.rank, self.world_size, self.device = rank, world, torch.device("cpu")
        self.sleeping, self.reloads = "", 0
        self.binding, self.refused = None, ""
        self.obstacle = {}
        rows = -(-WORDS // 4) * 4 // world  # padded, as an engine pads its vocabulary
        q, kv, inner = HEADS * DIM // world, KV * DIM // world, INNER // world
        shapes = {"embed.weight": (rows, HIDDEN), "norm.weight": (HIDDEN,)}
        for layer in range(LAYERS):
            at = f"layers.{layer}."
            shapes |= {
                at + "qkv_proj.weight": (q + 2 * kv, HIDDEN),
                at + "o_proj.weight": (HIDDEN, q),
                at + "norm.weight": (HIDDEN,),
                at + "experts.w13": (EXPERTS, 2 * inner, HIDDEN),
                at + "experts.w2": (EXPERTS, HIDDEN, inner),
            }
        self.parameters = {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in shapes.items()}
        self.parameters["head.weight"] = self.parameters["embed.weight"]
        self.buffers = {"rope": torch.arange(4.0)}
        with torch.no_grad():
            self.load_weights(checkpoint(seed, dtype).items())

    def live(self):
        return {**self.parameters, **self.buffers}

    def held(self, name):
        return self.parameters if name in self.parameters else self.buffers

    def required(self):
        return set(self.parameters)

    def obstacles(self):
        return self.obstacle

    def alias(self):
        return self.binding

    def alias_refused(self):
        return self.refused

    def asleep(self):
        return self.sleeping

    def reload(self, names, weights):
        """Load again, and post-process as this model does."""
        self.load_weights(weights)
        self.reloads += 1

    def content(self):
        """A hash of every byte that is served."""
        digest = hashlib.sha256()
        for tensor in self.parameters.values():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def load_weights(self, weights):
        for name, tensor in weights:
            self._load(name, tensor)

    def _load(self, name, tensor):
        if name == "embed.weight":
            mine = self.parameters[name]
            rows = tensor[self.rank * mine.shape[0] : (self.rank + 1) * mine.shape[0]]
            assert tensor.shape[1] == HIDDEN
            mine[: rows.shape[0]].copy_(rows)
            mine[rows.shape[0] :].fill_(0)
            return
        *_, kind, _ = name.split(".")
        if ".experts." in name:
            at, expert = name.split(".experts.")[0], int(name.split(".")[3])
            self._expert(f"{at}.experts.", expert, kind, tensor)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            target = self.parameters[name.replace(kind, "qkv_proj")]
            q, kv = HEADS * DIM // self.world_size, KV * DIM // self.world_size
            start = {"q_proj": 0, "k_proj": q, "v_proj": q + kv}[kind]
            size = q if kind == "q_proj" else kv
            self._fit(target[start : start + size], tensor.narrow(0, self.rank * size, size))
        elif kind == "o_proj":
            target = self.parameters[name]
            self._fit(target, tensor.narrow(1, self.rank * target.shape[1], target.shape[1]))
        else:
            self._fit(self.parameters[name], tensor)

    def _expert(self, at, expert, kind, tensor):
        inner = INNER // self.world_size
        if kind == "down_proj":
            self._fit(self.parameters[at + "w2"][expert], tensor.narrow(1, self.rank * inner, inner))
        else:
            start = 0 if kind == "gate_proj" else inner
            target = self.parameters[at + "w13"][expert][start : start + inner]
            self._fit(target, tensor.narrow(0, self.rank * inner, inner))

    @staticmethod
    def _fit(target, source):
        assert target.shape == source.shape, f"shape {tuple(source.shape)} into {tuple(target.shape)}"
        target.copy_(source)


class FakeControl:
    """The scheduler's side: pauses, labels, caches; and workers in this process."""

    def __init__(self, models):
        self.models, self.receivers = models, [Receiver(model) for model in models]
        self.paused, self.tag, self.drops, self.modes = False, "default", 0, []
        self.hook = None
        self.publish_error = None

    async def workers(self, message, deadline):
        if self.hook is not None:
            changed = await self.hook(message, deadline)
            if changed is not None:
                return changed
        return [receiver.handle(message) for receiver in self.receivers]

    async def is_paused(self):
        return self.paused

    async def pause(self, mode):
        self.paused, self.drops = True, self.drops + 1
        self.modes.append(mode)

    async def resume(self):
        self.paused = False

    async def publish(self, label):
        if self.publish_error is not None:
            raise EngineError(self.publish_error)
        self.tag = label

    async def label(self):
        return self.tag

    async def contents(self):
        return [model.content() for model in self.models]


def make_app(control):
    """vLLM's RL routes as far as tests use them, and ours."""
    app = FastAPI()
    app.state.vime_sync = SyncServer(control)
    SyncEndpoints().attach_router(app)

    @app.post("/inference/v1/generate")
    async def generate(raw: Request):
        if control.paused:
            return JSONResponse({"paused": True}, status_code=503)
        return {"version": await control.label(), "content": await control.contents()}

    @app.post("/pause")
    async def pause():
        await control.pause("keep")

    @app.post("/resume")
    async def resume():
        await control.resume()

    @app.post("/watch")
    async def watch():
        app.state.watch = asyncio.create_task(watch_trainers(app.state.vime_sync, 0.02))

    return app


class FakeEngine:
    """A served fake engine, in a thread of this process."""

    def __init__(self, world=1, dtype=torch.float32, seed=0, control=None):
        self.control = control or FakeControl([FakeModel(rank, world, dtype, seed) for rank in range(world)])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(make_app(self.control), port=port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            if time.monotonic() > end:
                raise RuntimeError("the fake engine did not start")
            time.sleep(0.005)

    @property
    def sync(self):
        return self._server.config.app.state.vime_sync

    @property
    def model(self):
        return self.control.models[0]

    def content(self):
        return [model.content() for model in self.control.models]

    def stop(self):
        self._server.should_exit = True  # its thread ends by itself at the next tick

    def gone(self):
        """Stop, and wait until nothing listens."""
        self.stop()
        self._thread.join(10)


def content_of(seed, world=1, dtype=torch.float32, tensors=None):
    """The bytes that an engine serves after `load_weights` of a checkpoint."""
    models = [FakeModel(rank, world, dtype) for rank in range(world)]
    for model in models:
        with torch.no_grad():
            model.load_weights((tensors or checkpoint(seed, dtype)).items())
    return [model.content() for model in models]
