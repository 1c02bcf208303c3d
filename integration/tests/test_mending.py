"""An engine that died is started again once, however late the rollout's account of the loss is heard.

The owners here only keep score: what they stand in for, a server that dies at one instant of an update, is done for
real by the end-to-end tests, which cannot choose the instant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import vime_integration.mending as module
from vime_grpo import load_config
from vime_integration.actors.engine import EngineAddress
from vime_integration.cluster import ray_cluster
from vime_integration.mending import Mending
from vime_rollout.errors import EngineDeadError

PATIENCE_S = 60.0


class Owner:
    """Owns a server that can be told to die."""

    def __init__(self) -> None:
        self.dead, self.starts = False, 0

    def die(self) -> None:
        self.dead = True

    def health(self) -> None:
        if self.dead:
            raise EngineDeadError("engine died", where="engine engine-0")

    def restart(self) -> EngineAddress:
        self.dead = False
        self.starts += 1
        return EngineAddress("engine-0", f"http://127.0.0.1:{self.starts}", 0.0)


class Rollout:
    """Tells which engines it goes without."""

    def __init__(self) -> None:
        self.without: dict[str, str] = {}
        self.asked = 0

    def lost(self) -> dict[str, str]:
        self.asked += 1
        return dict(self.without)

    def engine_lost(self, name: str) -> None:
        self.without[name] = "engine is being started again"

    def engine_back(self, address: EngineAddress, version: int) -> None:
        assert version == 2
        del self.without[address.name]

    def times_asked(self) -> int:
        return self.asked


class Session:
    """Brings every engine to the version asked for."""

    served = 1

    @contextmanager
    def writing(self, version: int) -> Iterator[SimpleNamespace]:
        block = SimpleNamespace(report=None)
        yield block
        self.served, block.report = version, object()

    def replace(self, old: str, new: str) -> None:
        assert old != new

    def resync(self, url: str) -> None:
        raise AssertionError("an engine that comes back during a block gets the block's version at its end")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(cpus=4, environment={}):
        yield


def until(mending: Mending, done: Callable[[], bool]) -> None:
    """Let the driver wait, as it does while a task of the run is under way."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "nothing happened"
        mending()


def test_an_engine_taken_back_is_not_lost_by_an_answer_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while the weights are written; the rollout says so, and is heard only after it took the engine back."""
    from integration_support import config_file  # here, because the actors import this module where it is not found

    monkeypatch.setattr(module, "HEALTH_EVERY_S", 0.0)
    owner: Any = ray.remote(Owner).options(num_cpus=0).remote()
    rollout: Any = ray.remote(Rollout).options(num_cpus=0).remote()
    first = EngineAddress("engine-0", "http://127.0.0.1:0", 0.0)
    session: Any = Session()
    said: list[str] = []
    config = load_config(config_file(tmp_path, steps=1, save_every=1))
    mending = Mending(
        config, {"engine-0": owner}, {"engine-0": first}, {}, rollout, session, aliased=False, note=said.append
    )
    with mending.writing(2):
        ray.get(owner.die.remote(), timeout=PATIENCE_S)
        until(mending, lambda: mending.restarts == 1)
        before = ray.get(rollout.times_asked.remote(), timeout=PATIENCE_S)
        mending._asked.clear()
        mending()
        while ray.get(rollout.times_asked.remote(), timeout=PATIENCE_S) == before:  # the answer is there, unread
            assert mending._asked, "the rollout is asked"
    after = ray.get(rollout.times_asked.remote(), timeout=PATIENCE_S)
    until(mending, lambda: ray.get(rollout.times_asked.remote(), timeout=PATIENCE_S) > after + 1)
    assert ray.get(rollout.lost.remote(), timeout=PATIENCE_S) == {}
    assert mending.restarts == 1, said
    assert len(said) == 1
