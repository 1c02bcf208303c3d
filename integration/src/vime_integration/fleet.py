"""The actors of a run: started together, watched while they work, mended when an engine dies, stopped in order.

Start is parallel, because an engine's start is the longest single wait of a run. Stop is orderly first (engines end
their process trees, trainers give back shared memory) and forced after its deadline; Ray ends what is left.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from vime_devices import Platform, VimeError
from vime_grpo import RunConfig
from vime_rollout import CpuOptions, EngineConfig
from vime_rollout.engine import held_port, temporary_variables
from vime_sync import Choice, SyncSession, engine_arguments, engine_environment, merge_manifests, sweep

from vime_integration.actors.engine import EngineActor, EngineAddress
from vime_integration.actors.rollout import RolloutActor
from vime_integration.actors.streaming import StreamingRolloutActor
from vime_integration.actors.trainer import TrainerActor
from vime_integration.mending import GRACE_S, Mending, Written
from vime_integration.placement import Placement, Seat
from vime_integration.run_folder import RunFolder
from vime_integration.sharing import choose, makes_room, offloads, shares_devices, sleeps
from vime_integration.translate import cache_arguments, head_arguments
from vime_integration.wait import fetch, gather

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 20.0
# A rank whose peer died waits in a collective that never ends, so it is not waited for at the end of a failed run.
STOP_TRAINER_S = 5.0


class Fleet:
    """Every process of one run besides the driver.

    Args:
        config: The run's configuration.
        placement: Where each process runs.
        run: The run folder, for log files.
        note: Shows one line to the user.
        temporary: Temporary folder of the trainer ranks, which are killed in the end; None leaves them the user's.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        run: RunFolder,
        note: Callable[[str], None] = lambda _text: None,
        temporary: Path | None = None,
    ) -> None:
        """Create nothing yet; ``start`` creates the actors and starts what they own."""
        self._config = config
        self._placement = placement
        self._run = run
        self._note = note
        self._temporary = {} if temporary is None else temporary_variables(temporary, os.environ)
        self.trainers: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.rollout: Any = None
        self._mending: Mending | None = None
        self._pids: dict[str, list[int]] = {}
        self._restarts_seen = 0

    @property
    def makes_room(self) -> bool:
        """Whether the trainer gives engines the device memory that it can spare before they generate."""
        return makes_room(self._config, self._placement)

    @property
    def offloads(self) -> bool:
        """Whether that is the memory of gradients and optimiser, too."""
        return offloads(self._config, self._placement)

    @property
    def sleeps(self) -> bool:
        """Whether engines give device memory back while the trainer works."""
        return sleeps(self._config, self._placement)

    @property
    def engine_devices(self) -> int:
        """Devices that all engines have together; on a CPU, engines times their tensor parallel size."""
        return self._config.engine.servers * self._config.engine.tensor_parallel

    def start(self, checkpoint: Path | None = None) -> None:
        """Start everything and open the session that updates the engines.

        Trainer and engines start in parallel, unless they share devices: engines that are to run on the trainer's
        memory need it there first, and an engine measures what is free on its device, which must not change meanwhile.

        Args:
            checkpoint: The trainer's part of a bundle, to continue from.

        Raises:
            VimeError: Something did not start; by name, with its cause.
        """
        config = self._config
        choice = choose(config, self._placement)
        logger.info("weights: %s", choice)
        folder = {"folder": str(self._run.weights.absolute())} if choice.transport == "disk" else {}
        publish = {"transport": choice.transport, "options": folder}
        for rank, seat in enumerate(self._placement.trainers):
            variables = {**seat.environment, "OMP_NUM_THREADS": str(seat.threads), **self._temporary}
            options = _options(seat.name, variables)
            actor = ray.remote(TrainerActor).options(**options)
            self.trainers[seat.name] = actor.remote(config, rank, seat, publish, self._log(seat.name))
        rollout = StreamingRolloutActor if config.pipeline.mode == "async" else RolloutActor
        self.rollout = ray.remote(rollout).options(**_options("rollout")).remote(config, self._log("rollout"))
        with held_port("127.0.0.1", 0, "trainer ranks") as port:
            answers = self._answers(f"tcp://127.0.0.1:{port}", checkpoint, choice)
        self._connect(answers, aliased=choice.weights != "dummy")

    def _answers(self, rendezvous: str, checkpoint: Path | None, choice: Choice) -> dict[str, Any]:
        """Let everything start, engines after the ranks where these must be first; return the answers by name."""
        config = self._config
        tasks = {
            name: actor.start.remote(rendezvous, checkpoint, make_room=self.makes_room, offload=self.offloads)
            for name, actor in self.trainers.items()
        }
        tasks["rollout"] = self.rollout.start.remote()
        deadline = config.engine.start_deadline_s + config.pipeline.ray_start_deadline_s
        answers: dict[str, Any] = {}
        if choice.weights != "dummy" or shares_devices(config, self._placement):
            answers, tasks = gather(tasks, doing="start", deadline_s=deadline), {}
            manifest = merge_manifests([answers[name] for name in self.trainers])
            self._run.manifest.write_text(json.dumps(manifest), encoding="utf-8")
        for seat in self._placement.engines:
            actor = ray.remote(EngineActor).options(**_options(f"{seat.name}-owner"))
            self.engines[seat.name] = actor.remote(self._engine_config(seat, choice), self._log(f"{seat.name}-owner"))
        tasks |= {name: actor.start.remote() for name, actor in self.engines.items()}
        return answers | gather(tasks, doing="start", deadline_s=deadline)

    def _connect(self, answers: Mapping[str, Any], *, aliased: bool) -> None:
        """Let the rollout reach the engines, and open the session."""
        config = self._config
        addresses = {name: answers[name] for name in self.engines}
        for number, url in enumerate(config.engine.urls):  # somebody else's: used, never started and never stopped
            addresses[f"external-{number}"] = EngineAddress(f"external-{number}", url, 0.0)
        reach = self.rollout.connect.remote(list(addresses.values()))
        gather({"rollout": reach}, doing="reach the engines", deadline_s=120.0)
        self._read_pids()
        session = SyncSession(
            [address.url for address in addresses.values()],
            merge_manifests([answers[name] for name in self.trainers]),
            deadline_s=config.sync.deadline_s,
            in_flight="wait" if config.pipeline.update_mode == "drain" else "keep",
            reload=config.sync.reload,
        )
        self._mending = Mending(
            config, self.engines, addresses, self.trainers, self.rollout, session, aliased, self._note
        )
        for plan in session.connect():
            if plan.get("alias_refused"):
                self._note(f"weights are copied, because engines cannot run on the trainer's: {plan['alias_refused']}")

    def writing(self, version: int) -> AbstractContextManager[Written]:
        """A block in which trainer ranks write weights; every engine serves them as ``version`` at its end.

        Raises:
            SyncError: An engine refused; every engine serves what it served, or says otherwise.
        """
        return self._mended().writing(version)

    def counts(self) -> dict[str, float]:
        """Return ``engine/restarts`` and the versions that the engines say they serve."""
        return self._mended().counts()

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids of the run by role; an engine's are its server's whole tree."""
        if self._mended().restarts != self._restarts_seen:
            self._restarts_seen = self._mended().restarts
            self._read_pids()
        return self._pids | {"driver": [os.getpid()]}

    def _read_pids(self) -> None:
        actors = {**self.engines, **self.trainers, "rollout": self.rollout}
        tasks = {name: actor.pids.remote() for name, actor in actors.items()}
        self._pids = gather(tasks, doing="say which processes they are", deadline_s=60.0)

    def _mended(self) -> Mending:
        assert self._mending is not None, "start() comes first"
        return self._mending

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
        return list(gather(tasks, doing=doing, deadline_s=limit, watch=self._mending).values())

    def ask_rollout(self, method: str, *arguments: Any, doing: str, deadline_s: float) -> Any:
        """Call a method on the rollout actor and wait; an engine that dies meanwhile is started again.

        When generation fails because an engine died, the error of the engine itself is raised: it has the exit code and
        the end of the log. The deadline leaves room for the restarts that the configuration allows.
        """
        task = {"rollout": getattr(self.rollout, method).remote(*arguments)}
        try:
            return gather(task, doing=doing, deadline_s=deadline_s + GRACE_S, watch=self._mending)["rollout"]
        except Exception as error:
            # Whatever the rollout stumbled over, a dead process is the cause and what it stumbled over the symptom.
            told = self._told_by_the_dead()
            if told is None:
                raise
            raise told from error

    def stop(self) -> None:
        """End every process, politely first; never raises, says what it had to force."""
        if self._mending is not None:
            self._mending.close()
        tasks = {name: (actor.stop.remote(), STOP_DEADLINE_S) for name, actor in self.engines.items()}
        tasks |= {name: (actor.stop.remote(), STOP_TRAINER_S) for name, actor in self.trainers.items()}
        if self.rollout is not None:
            tasks["rollout"] = (self.rollout.stop.remote(), STOP_DEADLINE_S)
        began = time.monotonic()
        for name, (reference, limit) in tasks.items():
            try:
                ray.get(reference, timeout=max(0.1, began + limit - time.monotonic()))
            except (RayError, TimeoutError, VimeError) as error:
                logger.warning("%s did not stop by itself: %s", name, str(error).strip().splitlines()[0])
        for actor in (*self.engines.values(), *self.trainers.values(), self.rollout):
            if actor is not None:
                ray.kill(actor)
        sweep()  # what killed processes of this run left in shared memory, such as an aliased engine's lease

    def _told_by_the_dead(self) -> VimeError | None:
        """Return what tells of a dead trainer rank or engine, or None where all of them live."""
        try:
            self._mended().check_trainers()
        except VimeError as told:
            return told
        for name, actor in self.engines.items():
            try:
                fetch(actor.health.remote(), name=name, doing="say how it is", deadline_s=10.0)
            except VimeError as told:
                return told
        return None

    def _engine_config(self, seat: Seat, choice: Choice) -> EngineConfig:
        config, on_cpu = self._config.engine, self._placement.platform is Platform.CPU
        manifest = "" if choice.weights == "dummy" else self._run.manifest
        arguments = engine_arguments(weights=choice.weights, manifest=manifest)
        cache = [] if on_cpu else cache_arguments(self._config)
        environment: dict[str, str | None] = {**seat.environment, **dict.fromkeys(seat.removed)}
        return EngineConfig(
            model=str(self._config.model.path),
            name=seat.name,
            dtype=config.dtype,
            max_model_len=config.max_model_len or self._config.rollout.max_context_tokens,
            tensor_parallel_size=config.tensor_parallel,
            gpu_memory_utilization=None if on_cpu else config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            enable_sleep_mode=self.sleeps,
            cpu=CpuOptions(kv_cache_gib=config.cpu_kv_cache_gib, threads=seat.threads) if on_cpu else None,
            arguments=(*arguments, *head_arguments(self._config), *cache, *config.extra_args),
            environment={**environment, **engine_environment()},
            log_path=str(self._log(seat.name)),
            max_concurrency=self._config.rollout.concurrency,
            start_deadline_s=config.start_deadline_s,
            request_deadline_s=self._config.rollout.request_deadline_s,
            retries=self._config.rollout.retries,
        )

    def _log(self, name: str) -> Any:
        return self._run.logs.absolute() / f"{name}.log"


def _options(name: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    # Actor names are unique in a cluster, and a run has a cluster of its own.
    return options | {"name": name, "runtime_env": {"env_vars": dict(environment or {})}}
