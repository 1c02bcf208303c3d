"""The engine worker's side of a sync: a small state machine that never leaves a half-written model behind.

One receiver lives in each engine worker. It is driven by messages (plain dicts) and answers each with a dict; a refusal
is an answer, not an exception, so it reaches the trainer as the named error that it is.

States::

    unconnected --connect--> idle(v) --stage(v+n)--> staged(v, v+n) --commit--> idle(v+n)
                                ^----------abort-----------'
    any --failure while live memory is being written--> torn(reason) --stage, commit of a whole version--> idle

Modes of a commit, chosen at `connect` and reported:

* ``shadow``: `stage` fills a second copy of the parameters, from memory that is allocated for the update and freed
  after it, and verifies the bytes that landed; `commit` copies it into the live parameters. Whatever fails before the
  commit, the live bytes were not touched.
* ``undo``: `stage` saves the live bytes in host memory; `commit` copies from the trainer's memory straight into live
  memory, and a failure in mid-copy puts the saved bytes back.
* ``direct``: `stage` only checks that the source is whole and at rest; `commit` copies from the trainer's memory
  straight into live memory. One pass, no extra memory. A failure in mid-copy leaves the worker torn.

An engine of several workers has written a version when all of them have: each waits, torn, for ``confirm``, and
``rollback`` takes back what can be taken back. So a worker that dies between two others leaves no engine that serves.

Live storage never moves: parameters are written in place, so captured graphs stay valid. Each commit first checks that
every live tensor still has the address that the plan was made for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vime_sync.agree import Share
from vime_sync.connection import Connection, Staged, choose_mode, reach
from vime_sync.copying import choose_copier
from vime_sync.errors import (
    AlreadyStartedError,
    AsleepError,
    NotPausedError,
    NotStartedError,
    PlanError,
    SecondTrainerError,
    SyncError,
    TornEngineError,
    TransactionError,
    VersionConflictError,
    to_wire,
)
from vime_sync.manifest import check_manifest
from vime_sync.messages import integer, text
from vime_sync.model import Anchors, Model, plan_model
from vime_sync.process import is_dead
from vime_sync.verify import live_digests

logger = logging.getLogger(__name__)


class Receiver:
    """See the module's text. Not thread-safe: a worker handles one message at a time."""

    def __init__(self, model: Model) -> None:
        """Serve `model`; its version is -1 until the first commit."""
        self.model = model
        self.version = -1
        self.digest: str = ""
        self.torn: str = ""
        self._link: Connection | None = None
        self._staged: Staged | None = None
        self._written: Staged | None = None
        self._opened: Staged | None = None
        self._operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "state": self._state,
            "open": self._open,
            "connect": self._connect,
            "agree": self._agree,
            "stage": self._stage,
            "commit": self._commit,
            "abort": self._abort,
            "confirm": self._confirm,
            "rollback": self._rollback,
            "disconnect": self._disconnect,
            "verify": self._verify,
        }

    def handle(self, message: Any) -> dict[str, Any]:
        """Do what a message asks; never raises.

        Args:
            message: A dict with ``op`` and the operation's fields.

        Returns:
            ``{"ok": True, "rank", "version", "state", ...}`` or ``{"ok": False, ..., "error", "what", ...}``.
        """
        try:
            reply = {"ok": True, **self._operation(message)(message)}
        except SyncError as error:
            reply = {"ok": False, **to_wire(error)}
        except Exception as error:
            logger.exception("vime-sync: a message failed")
            reply = {"ok": False, **to_wire(SyncError(f"{type(error).__name__}: {error}", where="engine worker"))}
        return {
            **reply,
            "rank": self.model.rank,
            "version": self.version,
            "state": self.state,
            "digest": self.digest,
            "torn": self.torn,
        }

    def _operation(self, message: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        operation = self._operations.get(str(message.get("op"))) if isinstance(message, dict) else None
        if operation is None:
            raise TransactionError("unknown message", seen=repr(message)[:80], expected=", ".join(self._operations))
        return operation

    @property
    def state(self) -> str:
        """``unconnected``, ``idle``, ``writing`` (aliased weights), ``staged`` or ``torn``."""
        if self.torn:
            return "torn"
        if self._staged is not None:
            return "staged"
        if self._opened is not None:
            return "writing"
        return "unconnected" if self._link is None else "idle"

    def _state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        binding = self.model.alias()
        return {"trainers": [] if binding is None else binding.processes}

    def _verify(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Digests of the live bytes; needs no trainer."""
        self._check_awake()
        return live_digests(self.model, message)

    # -- connect ------------------------------------------------------------------------------------------------------

    def _connect(self, message: Mapping[str, Any]) -> dict[str, Any]:
        session = text(message, "session")
        self._check_owner(session, takeover=bool(message.get("takeover")))
        if self._staged is not None:
            self._drop_staged()
        manifest = message.get("manifest")
        tensors = check_manifest(manifest)
        assert isinstance(manifest, dict)
        started = time.perf_counter()
        plan = plan_model(self.model, tensors, cast=bool(message.get("cast")), reload=bool(message.get("reload")))
        mode = choose_mode(self.model, str(message.get("mode", "auto")), plan)
        copier = choose_copier(str(message.get("copier", "auto")), self.model.device)
        reached = reach(self.model, plan, tensors, manifest)
        plan, importer = reached.plan, reached.importer
        binding = self.model.alias()
        if binding is not None and self.version < 0:
            self.version = binding.held_version()  # what the trainer holds is what this engine already serves
        self._give_up()  # whoever had opened aliased weights is not here any more
        if self._link is not None and self._link.importer is not importer:
            self._link.importer.close()
        self._link = Connection(
            session=session,
            owner=message.get("owner"),
            plan=plan,
            mode=mode,
            importer=importer,
            buffers=reached.buffers,
            controls=reached.controls,
            anchors=Anchors(self.model, plan.live_names),
            pieces={t.name: [(p.region.rank, p.index) for p in t.pieces] for t in tensors},
            share=Share.alone(plan),
            copier=copier,
            parts=reached.parts,
        )
        self._link.bind(self.model, manifest)
        reply: dict[str, Any] = {
            "plan": {**plan.summary(), "alias_refused": self.model.alias_refused()},
            "mode": self._link.mode,
            "copier": self._link.copier,
            "seconds": time.perf_counter() - started,
        }
        if self.model.world_size > 1:
            reply["slices"] = [[c.tensor, list(c.box.start), list(c.box.shape), list(c.full)] for c in plan.copies]
        return reply

    def _check_owner(self, session: str, *, takeover: bool) -> None:
        link = self._link
        if link is None or link.session == session or takeover or is_dead(link.owner):
            return
        raise SecondTrainerError(
            "another trainer owns this engine",
            where=f"engine worker {self.model.rank}",
            seen=f"session {session}",
            expected=f"session {link.session} of {link.owner}",
            fix="close the other session, or connect with takeover=True",
        )

    def _agree(self, message: Mapping[str, Any]) -> dict[str, Any]:
        link = self._owned(message)
        link.take(Share.from_wire(message.get("shares"), self.model.rank))
        return {}

    def _disconnect(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._owned(message)
        self.close()
        return {}

    def close(self) -> None:
        """Let go of the trainer; the version served stays."""
        self._drop_staged()
        if self._link is not None:
            self._link.importer.close()
            self._link = None

    # -- transaction --------------------------------------------------------------------------------------------------

    def _owned(self, message: Mapping[str, Any]) -> Connection:
        if self._link is None:
            raise NotStartedError(
                "no trainer is connected", where=f"engine worker {self.model.rank}", fix="call SyncSession.connect()"
            )
        if text(message, "session") != self._link.session:
            self._check_owner(text(message, "session"), takeover=False)
            raise NotStartedError("this session is not connected", seen=str(message.get("session")))
        return self._link

    def _stage(self, message: Mapping[str, Any]) -> dict[str, Any]:
        link = self._owned(message)
        version, base = integer(message, "version"), integer(message, "base")
        if self._staged is not None:
            raise AlreadyStartedError(
                "an update is already open",
                where=f"engine worker {self.model.rank}",
                seen=f"version {self._staged.version} is staged",
                fix="commit or abort it first",
            )
        if base != self.version or version <= self.version:
            raise VersionConflictError(
                "the engine is not where the update starts" if base != self.version else "the version is not newer",
                where=f"engine worker {self.model.rank}",
                seen=f"update {base} -> {version}",
                expected=f"from {self.version} to more",
            )
        started = time.perf_counter()
        sequences = {
            rank: control.check(version, where=f"trainer rank {rank}") for rank, control in link.controls.items()
        }
        if link.mode == "alias" and (self._opened is None or self._opened.version != version):
            raise NotPausedError(
                "aliased weights may only be written while the engine is paused for it",
                where=f"engine worker {self.model.rank}",
                seen=f"version {version} without its writing block",
                fix="train inside `with session.writing(version):`",
            )
        link.require(str(message.get("expect", "")))
        self._check_awake()
        self._check_addresses(link)
        link.importer.fetch(version)
        staged = Staged(version, sequences)
        reply: dict[str, Any] = {"bytes": 0 if link.mode == "alias" else link.plan.nbytes}
        if link.mode == "shadow":
            live = self.model.live()
            staged.shadow = {name: torch.empty_like(live[name]) for name in link.plan.live_names}
            reply |= link.transfer(staged.shadow, staged.sequences, self.model.device)
        elif link.mode == "undo":
            staged.undo = self._keep(link)
        self._staged = staged
        return {**reply, "seconds": time.perf_counter() - started}

    def _keep(self, link: Connection) -> dict[str, torch.Tensor]:
        """The live bytes, in host memory that is allocated once and used for every update."""
        live = self.model.live()
        for name in link.plan.live_names:
            now = live[name].data
            kept = link.undo.get(name)
            if kept is None:
                kept = torch.empty(now.shape, dtype=now.dtype, pin_memory=self.model.device.type == "cuda")
                link.undo[name] = kept
            kept.copy_(now)
        return link.undo

    def _check_addresses(self, link: Connection) -> None:
        if moved := link.anchors.moved():
            raise PlanError(
                "a live tensor has moved since the plan was made",
                where=f"live tensor {moved}",
                fix="connect again; something reloaded or re-allocated the engine's weights",
            )

    def _commit(self, message: Mapping[str, Any]) -> dict[str, Any]:
        link = self._owned(message)
        ahead = self._stage(message) if message.get("stage") and link.mode == "alias" else {}
        version, staged = integer(message, "version"), self._staged
        if staged is None and self.version == version:
            return {"seconds": 0.0, "repeated": True}  # a commit may be asked again when its answer was lost
        if staged is None or staged.version != version:
            raise NotStartedError(
                "this version is not staged",
                where=f"engine worker {self.model.rank}",
                seen=str(version),
                expected="nothing" if staged is None else str(staged.version),
            )
        started = time.perf_counter()
        if not ahead:  # else it was checked a moment ago
            self._check_awake()
            self._check_addresses(link)
        staged.clean = not self.torn
        self._staged, self._written = None, staged
        self.torn = f"interrupted while version {version} was being written"
        try:
            reply = self._write(link, staged)
        except Exception as error:
            raise self._failed(staged, error) from error
        staged.digest = str(message.get("digest") or reply.get("sum", ""))
        if link.share.local:
            self._confirmed(staged)
        else:
            self.torn = f"version {version} is written here and waits for the engine's other workers"
        return {**ahead, **reply, "seconds": time.perf_counter() - started}

    def _write(self, link: Connection, staged: Staged) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        _synchronize(self.model.device)  # a paused scheduler may have left its last step on another stream
        with torch.no_grad():
            if link.mode == "shadow":
                live = self.model.live()
                for name, values in staged.shadow.items():
                    live[name].data.copy_(values)
            else:
                # Its program was bound to the live tensors at connect.
                reply = link.transfer({}, staged.sequences, self.model.device)
            if link.plan.reload:
                self._reload(link, staged)
            _synchronize(self.model.device)
        return reply

    def _reload(self, link: Connection, staged: Staged) -> None:
        """Let the engine's own loaders fill what no copy can reach."""
        found = {rank: control.digests() for rank, control in link.controls.items()}
        mode, phase = next((m, p) for m, p, _ in found.values())
        published = {rank: digests for rank, (_, _, digests) in found.items()}
        self.model.reload(link.plan.reload, link.assembled(mode, phase, published))
        for rank, control in link.controls.items():
            control.recheck(staged.sequences[rank], where=f"trainer rank {rank}")

    def _failed(self, staged: Staged, error: Exception) -> Exception:
        """Writing failed: put the old bytes back if they were kept, else be torn; the error to raise."""
        if staged.undo and staged.clean:
            self._restore(staged)
            return error
        self._written = None
        self.torn = f"version {staged.version} failed while it was being written: {error}"
        return TornEngineError(
            "live weights are a mix of versions",
            where=f"engine worker {self.model.rank}",
            seen=str(error),
            fix="send a whole newer version",
        )

    def _restore(self, staged: Staged) -> None:
        live = self.model.live()
        with torch.no_grad():
            for name, values in staged.undo.items():
                live[name].data.copy_(values)
        _synchronize(self.model.device)
        self.torn, self._written = "", None

    def _confirmed(self, staged: Staged) -> None:
        self.version, self.digest, self.torn, self._written = staged.version, staged.digest, "", None
        self._opened = None

    def _confirm(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """All workers wrote, and together they wrote what was published."""
        self._owned(message)
        version = integer(message, "version")
        if self._written is None and self.version == version and not self.torn:
            return {"repeated": True}
        if self._written is None or self._written.version != version:
            raise NotStartedError(
                "this version is not written", where=f"engine worker {self.model.rank}", seen=str(version)
            )
        self._written.digest = str(message.get("digest", ""))
        self._confirmed(self._written)
        return {}

    def _rollback(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Some worker did not write, or what they wrote together is wrong: back to the old version, or torn."""
        self._owned(message)
        version, written = integer(message, "version"), self._written
        reason = str(message.get("reason", ""))
        self._drop_staged()
        if written is not None and written.undo and written.clean:
            self._restore(written)
        elif written is not None:
            self._written = None
            self.torn = f"version {version} is written here, but the engine as a whole could not take it: {reason}"
        elif self.version == version:
            self.torn = f"version {version} was committed here, but the engine could not publish it: {reason}"
        self._give_up()
        return {}

    def _check_awake(self) -> None:
        if reason := self.model.asleep():
            raise AsleepError(
                "the engine's weights are not in memory",
                where=f"engine worker {self.model.rank}",
                seen=reason,
                expected="an engine that is awake",
                fix="POST /wake_up (or /wake_up?tags=weights) before the update",
            )

    def _abort(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._owned(message)
        self._drop_staged()
        self._give_up()
        return {}

    def _give_up(self) -> None:
        """End a block of aliased weights without a version: as before if the trainer has written nothing, else torn."""
        opened, self._opened = self._opened, None
        written = {} if opened is None or self._link is None else self._link.controls
        if opened is not None and any(c.sequence != opened.sequences[r] for r, c in written.items()):
            self.torn = f"the trainer wrote into the aliased weights for version {opened.version} and gave up"

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The engine is paused: from here until the commit the trainer may write what this engine aliases."""
        link = self._owned(message)
        version = integer(message, "version")
        if link.mode != "alias":
            raise TransactionError("nothing is aliased here", where=f"engine worker {self.model.rank}")
        if self._opened is not None:
            raise AlreadyStartedError("the weights are open already", seen=f"version {self._opened.version}")
        if version <= self.version:
            raise VersionConflictError("the version is not newer", seen=str(version), expected=f"> {self.version}")
        self._check_awake()
        _synchronize(self.model.device)  # the trainer writes next, and no stream orders it after our last step
        self._opened = Staged(version, {rank: control.sequence for rank, control in link.controls.items()})
        return {}

    def _drop_staged(self) -> None:
        self._staged = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
