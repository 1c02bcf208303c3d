"""An engine that owns its vLLM server process, from the first check to the last process of its tree.

Start: the model folder is checked, the port is held, the server is started under a warden, and ``/health`` is asked
until it answers, the process ends, or the deadline passes. Readiness is then proven, not assumed: the server must carry
this engine's name (another server may have taken the port), have an integer weight version, and generate one token with
a logprob. Every failure on the way ends the process tree and carries the tail of the log.

Restart. ``restart`` works from any state: after a death, a hang, torn weights. The old tree is ended for certain before
the new one is started (two servers would fight over the devices), without the polite part, for a process that hangs
does not listen. What the new server holds is what the model folder holds, and that is no version of a running training:
unless told otherwise it is labelled ``UNSENT_VERSION``, so nothing that asks for a version gets tokens from it before
weights are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Self

from vime_rollout.engine.client import EngineClient
from vime_rollout.engine.config import EngineConfig
from vime_rollout.engine.ports import held_port
from vime_rollout.engine.process import EngineProcess
from vime_rollout.engine.remote import UNSENT_VERSION, RemoteEngine
from vime_rollout.engine.state import EngineState
from vime_rollout.engine.window import dialect_of, installed_release
from vime_rollout.errors import EngineDeadError, EngineError, EngineStartError, EngineTimeoutError

_POLL_S = 0.1
_HEALTH_S = 10.0
#: How long a process may take to be gone after its connections broke.
_LAST_BREATH_S = 3.0


class VLLMEngine(RemoteEngine):
    """One vLLM server, owned: ``async with VLLMEngine(config) as engine: ...`` starts and ends it.

    Args:
        config: How to start it.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Keep the configuration; ``start`` starts."""
        self.config = config
        self._process: EngineProcess | None = None
        self.start_seconds = 0.0
        super().__init__(f"http://{config.host}:{config.port}", name=config.name, client=self._make_client(config.port))

    def _make_client(self, port: int) -> EngineClient:
        config = self.config
        return EngineClient(
            f"http://{config.host}:{port}",
            name=config.name,
            max_concurrency=config.max_concurrency,
            request_deadline_s=config.request_deadline_s,
            control_deadline_s=config.control_deadline_s,
            retries=config.retries,
            alive=lambda: self._process is not None and self._process.poll() is None,
        )

    @property
    def pids(self) -> list[int]:
        """Ids of the living processes of the engine."""
        return [] if self._process is None else self._process.members()

    async def start(self) -> None:
        """Start the server and return once it has generated a token.

        Raises:
            EngineStartError: When anything stands in the way; the process tree is ended, the log's tail is in the text.
        """
        self._states.move(EngineState.STARTING)
        await self._launch(self.config.initial_version)

    async def restart(self, *, initial_version: int = UNSENT_VERSION) -> None:
        """End the process tree, whatever state it is in, and start the server again; see the module's docstring.

        The port is the configured one, or a new free one where that is 0: read ``url`` afterwards. Requests made
        through this object wait meanwhile and are then sent to the new server.

        Args:
            initial_version: Label of the weights that the model folder holds.

        Raises:
            EngineStateError: When it is starting already.
            EngineError: When a process of the old tree survives SIGKILL.
            EngineStartError: As for ``start``; the engine is dead then, and may be restarted again.
        """
        self._states.restart()
        old, self._process = self._process, None  # from here on its end is no news to those who diagnose a failure
        try:
            await self._client.cut()
            if old is not None:
                await asyncio.shield(asyncio.to_thread(old.stop, forced=True))
        except BaseException as error:
            self._process = old
            if self.state is EngineState.STARTING:
                self._states.move(EngineState.DEAD, f"could not be restarted: {error}")
            raise
        await self._launch(initial_version)

    async def _launch(self, initial_version: int) -> None:
        began = time.monotonic()
        try:
            self.config.check_model()
            deadline = began + self.config.start_deadline_s
            with held_port(self.config.host, self.config.port, f"engine {self.name}") as port:
                await self._client.move(f"http://{self.config.host}:{port}")
                environment = self.config.child_environment()
                release = await asyncio.to_thread(installed_release, self.config.python, environment)
                dialect = self._client.dialect = dialect_of(release, where=f"engine {self.name}")
                self._process = EngineProcess(
                    self.config.command(port, dialect),
                    environment,
                    Path(self.config.log_path),
                    grace_s=self.config.stop_grace_s,
                    name=self.name,
                )
                await self._until_answering(self._process, deadline)
            await self._prove(deadline, initial_version)
        except BaseException as error:
            await self._end_process()
            if self.state is EngineState.STARTING:  # not where its death was seen already, or it was stopped meanwhile
                self._states.move(EngineState.DEAD, f"did not start: {error}")
            raise
        self._process.forget_log()
        self.start_seconds = time.monotonic() - began
        self._states.move(EngineState.READY)

    async def connect(self, initial_version: int = 0) -> None:
        """Start the engine; an owned engine is started, not connected to."""
        del initial_version  # the configuration has it
        await self.start()

    async def _until_answering(self, process: EngineProcess, deadline: float) -> None:
        while True:
            if (code := process.poll()) is not None:
                raise EngineStartError(
                    "engine died while starting", where=f"engine {self.name}", seen=process.describe_end(code)
                )
            if time.monotonic() > deadline:
                raise EngineStartError(
                    "engine did not start in time",
                    where=f"engine {self.name}",
                    seen=f"no answer after {self.config.start_deadline_s:g} s; last lines of {process.log_path}:\n"
                    + process.log_tail(),
                    fix="raise start_deadline_s, or look at the log",
                )
            with contextlib.suppress(EngineError):  # it does not listen yet; the two ends above are the bounds
                await self._client.control("GET", "/health", deadline_s=_HEALTH_S)
                return
            await asyncio.sleep(_POLL_S)

    async def _prove(self, deadline: float, initial_version: int) -> None:
        try:
            await self._check_identity()
            await self._greet(initial_version)
            # The first generation may compile kernels, so its bound is that of the start.
            await self.probe(max(1.0, deadline - time.monotonic()))
        except EngineStartError:
            raise
        except EngineError as error:
            better = await self._diagnose(error)
            raise EngineStartError(
                "engine started but does not generate", where=f"engine {self.name}", seen=str(better)
            ) from error

    async def _check_identity(self) -> None:
        models = await self._client.control("GET", "/v1/models")
        names = [model["id"] for model in models["data"]]
        if self.name not in names:
            raise EngineStartError(
                "another server answers on the engine's port",
                where=f"engine {self.name} at {self.url}",
                seen=f"models {names}",
                expected=f"model {self.name}",
            )

    async def health(self) -> None:
        """Ask whether the process lives and the server answers.

        Raises:
            EngineDeadError: When the process ended; with the tail of its log.
            EngineError: When it lives but does not answer.
        """
        if dead := self._dead_error():
            raise dead
        await super().health()

    async def stop(self) -> None:
        """End the whole process tree, politely first. Safe to call again, and after a death."""
        with contextlib.suppress(RuntimeError):  # connections of a loop that is closed already
            await self._client.close()
        await self._end_process()
        if self.state is not EngineState.STOPPED:
            self._states.move(EngineState.STOPPED)

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def _end_process(self) -> None:
        if self._process is not None:
            # Shielded: a cancelled owner still waits for the end of what it owns.
            await asyncio.shield(asyncio.to_thread(self._process.stop))

    async def _diagnose(self, error: EngineError) -> EngineError:
        # A process that died takes a moment to be gone; one that hangs would not go by waiting.
        deadline = time.monotonic() + (0.0 if isinstance(error, EngineTimeoutError) else _LAST_BREATH_S)
        while True:
            if dead := self._dead_error():
                return dead
            if time.monotonic() >= deadline:
                return error
            await asyncio.sleep(_POLL_S)

    def _dead_error(self) -> EngineDeadError | None:
        code = None if self._process is None else self._process.poll()
        if self._process is None or code is None:
            return None
        seen = self._process.describe_end(code)
        if self.state not in (EngineState.DEAD, EngineState.STOPPED):
            self._states.move(EngineState.DEAD, seen)
        return EngineDeadError("engine died", where=f"engine {self.name}", seen=seen, fix="restart it")
