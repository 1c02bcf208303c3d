"""The actors of a run: started together, watched while they work, stopped in order.

Start is parallel, because an engine's start is the longest single wait of a run. Stop is orderly first (engines end
their process trees, trainers give back shared memory) and forced after its deadline; Ray ends what is left.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from vime_devices import Platform, VimeError
from vime_grpo import RunConfig
from vime_rollout import CpuOptions, EngineConfig
from vime_sync import engine_arguments, engine_environment

from vime_integration.actors.engine import EngineActor, EngineAddress
from vime_integration.actors.rollout import RolloutActor
from vime_integration.actors.trainer import TrainerActor
from vime_integration.errors import PipelineError
from vime_integration.placement import Placement, Seat
from vime_integration.run_folder import RunFolder
from vime_integration.wait import fetch, gather

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 30.0
HEALTH_EVERY_S = 2.0
# An engine that computes in its server's own process answers between two of its steps, which can be long on a CPU.
HEALTH_DEADLINE_S = 150.0


class Fleet:
    """Every process of one run besides the driver.

    Args:
        config: The run's configuration.
        placement: Where each process runs.
        run: The run folder, for log files.
    """

    def __init__(self, config: RunConfig, placement: Placement, run: RunFolder) -> None:
        """Create the actors; ``start`` starts what they own."""
        self._config = config
        self._placement = placement
        self._run = run
        self.trainers: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.addresses: list[EngineAddress] = []
        self.rollout: Any = None
        self._watch: EngineWatch | None = None

    def start(self) -> list[dict[str, Any]]:
        """Start everything, in parallel.

        Returns:
            The manifest of each trainer rank's weights, in rank order.

        Raises:
            VimeError: Something did not start; by name, with its cause.
        """
        config = self._config
        for rank, seat in enumerate(self._placement.trainers):
            options = _options(seat.name, {**seat.environment, "OMP_NUM_THREADS": str(seat.threads)})
            actor = ray.remote(TrainerActor).options(**options)
            self.trainers[seat.name] = actor.remote(config, rank, seat, self._log(seat.name))
        for seat in self._placement.engines:
            actor = ray.remote(EngineActor).options(**_options(f"{seat.name}-owner"))
            self.engines[seat.name] = actor.remote(self._engine_config(seat), self._log(f"{seat.name}-owner"))
        self.rollout = ray.remote(RolloutActor).options(**_options("rollout")).remote(config, self._log("rollout"))
        rendezvous = f"tcp://127.0.0.1:{_free_port()}"
        tasks = {name: actor.start.remote(rendezvous) for name, actor in self.trainers.items()}
        tasks |= {name: actor.start.remote() for name, actor in self.engines.items()}
        tasks["rollout"] = self.rollout.start.remote()
        deadline = config.engine.start_deadline_s + config.pipeline.ray_start_deadline_s
        answers = gather(tasks, doing="start", deadline_s=deadline)
        self.addresses = [answers[name] for name in self.engines]
        gather({"rollout": self.rollout.connect.remote(self.addresses)}, doing="reach the engines", deadline_s=120.0)
        self._watch = EngineWatch(self.engines)
        return [answers[name] for name in self.trainers]

    def ask_trainers(self, method: str, *arguments: Any, doing: str, deadline_s: float | None = None) -> list[Any]:
        """Call a method on every trainer rank and wait for all.

        Args:
            method: Name of a ``TrainerActor`` method.
            arguments: Its arguments, the same for every rank.
            doing: What it does, for errors.
            deadline_s: By default the configuration's deadline of a trainer phase.

        Returns:
            The answers, in rank order.
        """
        limit = self._config.trainer.step_deadline_s if deadline_s is None else deadline_s
        tasks = {name: getattr(actor, method).remote(*arguments) for name, actor in self.trainers.items()}
        return list(gather(tasks, doing=doing, deadline_s=limit, watch=self._watch).values())

    def ask_rollout(self, method: str, *arguments: Any, doing: str, deadline_s: float) -> Any:
        """Call a method on the rollout actor and wait.

        When generation fails because an engine died, the error of the engine itself is raised: it has the exit code and
        the end of the log.
        """
        task = {"rollout": getattr(self.rollout, method).remote(*arguments)}
        try:
            return gather(task, doing=doing, deadline_s=deadline_s, watch=self._watch)["rollout"]
        except Exception as error:
            raise self._better(error) from error

    def stop(self) -> None:
        """End every process, politely first; never raises, says what it had to force."""
        tasks = {name: actor.stop.remote() for name, actor in {**self.engines, **self.trainers}.items()}
        if self.rollout is not None:
            tasks["rollout"] = self.rollout.stop.remote()
        end = time.monotonic() + STOP_DEADLINE_S
        for name, reference in tasks.items():
            try:
                ray.get(reference, timeout=max(0.1, end - time.monotonic()))
            except (RayError, TimeoutError, VimeError) as error:
                logger.warning("%s did not stop by itself: %s", name, str(error).strip().splitlines()[0])
        for actor in (*self.engines.values(), *self.trainers.values(), self.rollout):
            if actor is not None:
                ray.kill(actor)

    def _better(self, error: Exception) -> Exception:
        """Return an engine's own account of its death, if one died; else ``error``.

        Whatever the rollout stumbled over, a dead engine is the cause and what it stumbled over the symptom.
        """
        for name, actor in self.engines.items():
            try:
                fetch(actor.health.remote(), name=name, doing="say how it is", deadline_s=10.0)
            except VimeError as told:
                return told
        return error

    def _engine_config(self, seat: Seat) -> EngineConfig:
        config, on_cpu = self._config.engine, self._placement.platform is Platform.CPU
        environment: dict[str, str | None] = {**seat.environment, **dict.fromkeys(seat.removed)}
        return EngineConfig(
            model=str(self._config.model.path),
            name=seat.name,
            dtype=config.dtype,
            max_model_len=config.max_model_len or self._config.rollout.max_context_tokens,
            tensor_parallel_size=config.tensor_parallel,
            gpu_memory_utilization=None if on_cpu else config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            cpu=CpuOptions(kv_cache_gib=config.kv_cache_gib, threads=seat.threads) if on_cpu else None,
            arguments=(*engine_arguments(weights="dummy"), *config.extra_args),
            environment={**environment, **engine_environment()},
            log_path=str(self._log(seat.name)),
            max_concurrency=self._config.rollout.concurrency,
            start_deadline_s=config.start_deadline_s,
            request_deadline_s=self._config.rollout.request_deadline_s,
            retries=self._config.rollout.retries,
        )

    def _log(self, name: str) -> Any:
        return self._run.logs.absolute() / f"{name}.log"


class EngineWatch:
    """Asks the engines how they are while the driver waits for something else.

    Args:
        engines: Name -> actor.
    """

    def __init__(self, engines: Mapping[str, Any]) -> None:
        """Ask nothing yet."""
        self._engines = dict(engines)
        self._asked: dict[str, tuple[Any, float]] = {}
        self._next = dict.fromkeys(engines, 0.0)

    def __call__(self) -> None:
        """Look at the answers that are there, and ask again where it is time.

        Raises:
            EngineError: An engine died or does not answer as one that is well.
        """
        now = time.monotonic()
        for name, actor in self._engines.items():
            if name not in self._asked:
                if now >= self._next[name]:
                    self._asked[name] = (actor.health.remote(), now)
                continue
            reference, since = self._asked[name]
            if ray.wait([reference], timeout=0)[0]:
                fetch(reference, name=name, doing="say how it is", deadline_s=10.0)
                del self._asked[name]
                self._next[name] = now + HEALTH_EVERY_S
            elif now - since > HEALTH_DEADLINE_S:
                raise PipelineError(
                    "an engine's owner does not answer",
                    where=name,
                    seen=f"silence for {HEALTH_DEADLINE_S:g} s",
                    fix=f"see the log of {name}-owner",
                )


def _options(name: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    # Actor names are unique in a cluster, and a run has a cluster of its own.
    return options | {"name": name, "runtime_env": {"env_vars": dict(environment or {})}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
