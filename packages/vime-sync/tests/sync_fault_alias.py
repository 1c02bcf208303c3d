"""The scenes of aliased weights: the trainer writes version 2 into the memory that the engine serves version 1 from."""

import contextlib
import json
import os
import signal
import time

import httpx
import sync_fault_lab as lab
from sync_alias import AliasTrainer, let_go, on_memory
from sync_fake_engine import FakeControl, FakeEngine, FakeModel
from sync_fault_list import lose
from sync_fault_scene import SCENARIOS, Scene, seen
from vime_sync import SyncSession

GROUP = "Aliased weights"


class Broken(Exception):
    """A training step that fails."""


class AliasScene(Scene):
    """An engine on the memory of a trainer, in this process or in one that can be killed, and its watch."""

    def __init__(self, trainer="here"):
        self.mode, self.deadline, self.stack = "alias", 20.0, contextlib.ExitStack()
        if trainer == "here":
            self.trainer = AliasTrainer(version=1)
            self.stack.callback(self.trainer.close)
            self.manifest = self.trainer.manifest
        else:
            self.trainer, self.pipe = fork(self.stack, trainer_main)
            self.manifest = json.loads(self.pipe.recv_bytes())
        control = FakeControl([on_memory(FakeModel(), self.manifest)])
        self.stack.callback(let_go, control)
        engine = FakeEngine(control=control)
        engine.world = 1
        self.engines = [engine]
        self.stack.callback(engine.stop)
        httpx.post(f"{engine.url}/watch", timeout=20).raise_for_status()
        self.session = self.connect()

    def block(self, step=lambda: None):
        """Write version 2 in a block, with a fault in the middle; what the controller sees."""

        def run():
            with self.session.writing(2):
                self.trainer.publisher._control.begin()
                self.trainer.fill(2)
                step()
                self.trainer.publisher.stage(2)

        return attempt(run)

    def settled(self):
        """Wait until the engine's watch has done what it will: nothing is open, and no dead trainer is served."""
        end = time.monotonic() + 60
        while self.engines[0].sync.opened_by is not None or self.engines[0].sync._busy:
            assert time.monotonic() < end, "nobody gave the block up"
            time.sleep(0.01)

    def condemned(self):
        """Wait until the engine has noticed that its trainer is gone."""
        end = time.monotonic() + 60
        while not self.engines[0].sync._condemned:
            assert time.monotonic() < end, "nobody noticed"
            time.sleep(0.01)

    def later(self):
        """The trainer writes a whole later version, driven by a fresh controller."""
        if not isinstance(self.trainer, AliasTrainer):
            return "needs a restart"
        with SyncSession([self.engines[0].url], self.manifest, deadline_s=20, takeover=True) as session:
            error = seen(lambda: self.trainer.write(session, 9, 3))
        return "yes" if error == "success" and self.serves(self.engines[0]) == "later" else error


def fork(stack, target, *arguments):
    """A process that ends with the scene."""
    ours, theirs = lab.context().Pipe()
    process = lab.context().Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    stack.callback(lambda: (process.kill(), process.join(10)))
    return process, ours


def trainer_main(pipe):
    """A trainer with memory that an engine can run on; begins to write when it is told to."""
    lab.die_with_parent()
    trainer = AliasTrainer(version=1)
    pipe.send_bytes(json.dumps(trainer.manifest).encode())
    while True:
        pipe.recv_bytes()
        trainer.publisher._control.begin()
        trainer.fill(2)
        pipe.send_bytes(b"{}")


def controller_main(pipe, url, manifest):
    """A driver that is killed in its writing block."""
    lab.die_with_parent()
    session = SyncSession([url], manifest, deadline_s=20, takeover=True)
    with session.writing(2):
        pipe.send_bytes(b"{}")
        pipe.recv_bytes()


def attempt(run):
    """What a controller sees, its own step's failure included."""
    try:
        return seen(run)
    except Broken:
        return "(its own error)"


def scenario(fault, **options):
    """Register a scene: the decorated function causes the fault and returns what the controller saw."""

    def add(function):
        def play():
            scene = AliasScene(**options)
            with scene.stack:
                controller = function(scene)
                return (controller, scene.serves(scene.engines[0]), scene.later())

        SCENARIOS[(GROUP, fault)] = play
        return function

    return add


def fail():
    raise Broken


@scenario("the step fails before it writes")
def _(scene):
    def run():
        with scene.session.writing(2):
            fail()

    return attempt(run)


@scenario("the step fails after it has begun to write")
def _(scene):
    return scene.block(fail)


@scenario("a byte changes after it was staged")
def _(scene):
    def run():
        with scene.session.writing(2):
            scene.trainer.publisher._control.begin()
            scene.trainer.fill(2)
            scene.trainer.publisher.stage(2)
            scene.trainer.publisher.source.buffers["flat"][3:4].add_(1)

    return attempt(run)


@scenario("somebody asks the engine to resume in the middle of a write")
def _(scene):
    return scene.block(lambda: httpx.post(f"{scene.engines[0].url}/resume", timeout=20))


@scenario("the trainer gives its memory away")
def _(scene):
    return seen(scene.trainer.publisher.close)


@scenario("open sent twice")
def _(scene):
    engine = scene.session._engines[0]
    engine.call("open", scene.session._body(engine, 2))
    again = seen(lambda: engine.call("open", scene.session._body(engine, 2)))
    scene.session.abort()
    return again


for op in ("open", "update"):
    for answered in (False, True):

        @scenario(f"{op}: {'answer' if answered else 'request'} lost")
        def _(scene, op=op, answered=answered):
            lose(scene.session._engines[0], op, answer=answered)
            return scene.block()


for wrote in (False, True):

    @scenario(f"the controller is killed in a block, {'after' if wrote else 'before'} the first write")
    def _(scene, wrote=wrote):
        scene.session.close()
        process, pipe = fork(scene.stack, controller_main, scene.engines[0].url, scene.manifest)
        pipe.recv_bytes()
        if wrote:
            scene.trainer.publisher._control.begin()
            scene.trainer.fill(2)
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        scene.settled()
        return "(killed)"


@scenario("the trainer is killed between two blocks", trainer="process")
def _(scene):
    scene.kill_trainer()
    scene.condemned()
    return "nothing"


@scenario("the trainer is killed in the middle of a write", trainer="process")
def _(scene):
    def run():
        with scene.session.writing(2):
            scene.pipe.send_bytes(b"{}")
            scene.pipe.recv_bytes()
            scene.kill_trainer()

    outcome = attempt(run)
    scene.condemned()
    return outcome
