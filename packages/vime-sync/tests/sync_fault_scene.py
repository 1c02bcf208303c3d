"""How a fault is caused and what is then looked at.

Each scene begins with engines that serve version 1 ("old"). Something goes wrong while version 2 ("new") is on its way.
Then every engine is asked to generate: the answer names the version and hashes every byte that is served. Last, a fresh
trainer sends a whole later version.
"""

import contextlib
import functools
import json
import os
import signal
import time

import httpx
import sync_fault_lab as lab
from sync_fake_engine import FakeEngine, checkpoint, content_of
from vime_sync import Publisher, SyncSession, WeightSource
from vime_sync.errors import SyncError

contents = functools.cache(content_of)


class ProcessEngine:
    """A fake engine in its own process, its workers in theirs."""

    def __init__(self, world):
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.world = f"http://127.0.0.1:{port}", world
        fork = lab.context()
        pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=lab.engine_main, args=(theirs, world, port))
        self.process.start()
        pipe.recv_bytes()
        end = time.monotonic() + 20
        while True:
            try:
                httpx.get(f"{self.url}/vime/state", timeout=5)
            except httpx.HTTPError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                return

    def plant(self, rank=None, **fault):
        """A fault in a worker, or in the server (rank None)."""
        httpx.post(f"{self.url}/fault", json={"rank": rank, "fault": fault}, timeout=10).raise_for_status()

    def stop(self):
        self.process.kill()
        self.process.join(10)


class HereEngine(FakeEngine):
    """A fake engine in this process."""

    def __init__(self, world):
        super().__init__(world=world)
        self.world = world

    def plant(self, rank=None, **fault):
        async def hook(message, deadline):
            return [
                lab.handle(receiver, message, fault if index == rank else None)
                for index, receiver in enumerate(self.control.receivers)
            ]

        self.control.hook = hook


class Scene:
    """Engines at version 1, and a trainer that is about to send version 2."""

    def __init__(self, *engines, mode="shadow", trainer="here", deadline_s=20.0):
        self.mode, self.deadline, self.stack = mode, deadline_s, contextlib.ExitStack()
        self.engines = []
        for kind, world in engines or (("here", 1),):
            self.engines.append((HereEngine if kind == "here" else ProcessEngine)(world))
            self.stack.callback(self.engines[-1].stop)
        if trainer == "here":
            self.tensors = checkpoint(1)
            self.publisher = Publisher(WeightSource.from_tensors(self.tensors))
            self.stack.callback(self.publisher.close)
            self.manifest = self.publisher.manifest()
        else:
            self._fork_trainer()
        self.stage(1, 1)
        self.session = self.connect()
        self.session.update(1)

    def _fork_trainer(self):
        fork = lab.context()
        self.pipe, theirs = fork.Pipe()
        self.trainer = fork.Process(target=lab.trainer_main, args=(theirs,))
        self.trainer.start()
        theirs.close()
        self.stack.callback(lambda: (self.trainer.kill(), self.trainer.join(10)))
        self.manifest = json.loads(self.pipe.recv_bytes())

    def connect(self, manifest=None, **options):
        options = {"mode": self.mode, "deadline_s": self.deadline} | options
        session = SyncSession([e.url for e in self.engines], manifest or self.manifest, **options)
        self.stack.callback(session.close)
        session.connect()
        return session

    def stage(self, version, seed, die=False):
        if hasattr(self, "pipe"):
            self.pipe.send_bytes(json.dumps({"version": version, "seed": seed, "die": die}).encode())
            with contextlib.suppress(EOFError):
                self.pipe.recv_bytes()
            return
        for name, tensor in checkpoint(seed).items():
            self.tensors[name].copy_(tensor)
        self.publisher.stage(version)

    def kill_trainer(self):
        os.kill(self.trainer.pid, signal.SIGKILL)
        self.trainer.join(10)

    def update(self, version=2, session=None):
        """Try; what the controller sees."""
        return seen(lambda: (session or self.session).update(version))

    def controller(self, version=2, **fault):
        """Update from a controller that dies; waits until it has."""
        self.session.close()
        fork = lab.context()
        pipe, theirs = fork.Pipe()
        options = {"mode": self.mode}
        urls = [engine.url for engine in self.engines]
        process = fork.Process(target=lab.controller_main, args=(theirs, urls, self.manifest, version, options, fault))
        process.start()
        theirs.close()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        pipe.close()
        return "(killed)"

    def serves(self, engine):
        """What an engine answers to a request for tokens."""
        try:
            answer = httpx.post(f"{engine.url}/inference/v1/generate", json={}, timeout=20)
        except httpx.HTTPError:
            return "nothing: process gone"
        if answer.status_code == 500:
            return "nothing: engine dead"
        record = answer.json()
        if record.get("error") == "TornEngineError":
            return "refuses: torn"
        if record.get("paused"):
            return "nothing: paused"
        for word, seed in (("old", 1), ("new", 2), ("later", 3)):
            if record["content"] == contents(seed, engine.world):
                version = {"old": "1", "new": "2", "later": "9"}[word]
                return word if record["version"] == version else f"MISLABELLED {word} as {record['version']}"
        return "MIXED"

    def later(self):
        """A fresh trainer sends version 9 to the engines that live: whether they serve it."""
        alive = [e for e in self.engines if answers(e)]
        if not alive:
            return "needs a restart"
        with Publisher(WeightSource.from_tensors(checkpoint(3))) as publisher:
            publisher.stage(9)
            urls = [e.url for e in alive]
            with SyncSession(urls, publisher.manifest(), deadline_s=20, mode=self.mode, takeover=True) as session:
                error = seen(lambda: session.update(9))
        good = not error.endswith("Error") and all(self.serves(e) == "later" for e in alive)
        return ("yes" if len(alive) == len(self.engines) else "yes, after a restart of the dead") if good else error


def answers(engine):
    """Whether an engine's workers still say what they hold."""
    try:
        return httpx.get(f"{engine.url}/vime/state", timeout=20).is_success
    except httpx.HTTPError:
        return False


def seen(run):
    """The name of the error that a controller gets, or "success"."""
    try:
        run()
    except SyncError as error:
        return type(error).__name__
    return "success"


SCENARIOS = {}


def scenario(group, fault, **options):
    """Register a scene: the decorated function causes the fault and returns what the controller saw."""

    def add(function):
        engines = options.pop("engines", (("here", 1),))

        def play():
            scene = Scene(*engines, **options)
            with scene.stack:
                controller = function(scene)
                served = " / ".join(scene.serves(engine) for engine in scene.engines)
                return (controller, served, scene.later())

        SCENARIOS[(group, fault)] = play
        return function

    return add
