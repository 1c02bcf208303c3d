"""Collective: gloo, NCCL or RCCL between a trainer rank and engine workers, on this host or another.

Each worker has a two-member process group with each trainer rank that it reads from, apart from every group that the
trainer or the engine has of its own. Workers ask and trainers answer: a request is an entry in the rendezvous store,
the answer is one send. So the trainer needs no call beside `stage`; a thread of the exporter serves. A worker asks only
for buffers that its plan reads.

Nothing waits for ever: each group has a deadline, and a peer that misses it is dropped, with an error on its side that
names the rank and the buffer. The control block travels the same way, before the bytes and after them, so that a
trainer which writes too early is found out (see `vime_sync.control`).

One code for all three libraries: ``gloo`` carries CPU tensors, ``nccl`` device tensors (torch names RCCL so, too). The
rank's link carries the bytes once for each worker; there is no tree.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from vime_sync.control import ControlReader
from vime_sync.errors import StaleSourceError, TransportError
from vime_sync.layout import DTYPES, dtype_name
from vime_sync.source import WeightSource
from vime_sync.transports import BufferKey, needed_records

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]
#: Errors of a store or a group whose other side is gone; torch raises RuntimeErrors and subclasses of it.
_GONE = (RuntimeError, ValueError)
_POLL = timedelta(seconds=0.2)
#: Seconds between two questions whether a device has finished.
_ASK_S = 5e-5


def _group(backend: str, store: TCPStore, member: int, rank: int, deadline: timedelta) -> Any:
    """The two-member group of one worker and one trainer rank (which is rank 0)."""
    prefix = PrefixStore(f"pair-{member}", store)
    if backend == "gloo":
        return ProcessGroupGloo(prefix, rank, 2, deadline)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = 2 * deadline  # its watchdog would end the whole process; `_wait` gives up before it does
    return ProcessGroupNCCL(prefix, rank, 2, options)


def _wait(group: Any, work: Any, device: torch.device, deadline: timedelta) -> None:
    """Until a send or a receive is done.

    NCCL's own wait only orders streams, and to synchronise with one in which a transfer hangs would be to hang with it.
    So completion is asked for, and a group that misses its deadline is aborted, which ends its kernel.

    Raises:
        RuntimeError: If the deadline passed, or the other side is gone.
    """
    if device.type != "cuda":
        work.wait(deadline)
        return
    end = time.monotonic() + deadline.total_seconds()
    while not work.is_completed():
        if time.monotonic() > end:
            group.abort()
            raise RuntimeError(f"no transfer within {deadline.total_seconds()} s; the group was aborted")
        time.sleep(_ASK_S)
    work.wait()  # raises what went wrong, and orders this stream after the transfer


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """NCCL makes its communicator on the current device; a thread of our own begins on the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class CollectiveExporter:
    """Trainer side; see the module's text."""

    def __init__(
        self,
        source: WeightSource,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        backend: Backend | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        """Open the rendezvous.

        Args:
            source: What to export; all its buffers on one device.
            host: The address at which engines reach this process.
            port: A free one by default.
            backend: By default gloo for CPU tensors and nccl for others.
            deadline_s: Seconds that any one transfer may take.

        Raises:
            TransportError: If buffers lie on several devices or do not suit the backend, or the port is taken.
        """
        devices = {buffer.device for buffer in source.buffers.values()} or {torch.device("cpu")}
        if len(devices) != 1:
            raise TransportError("all buffers must lie on one device", where=f"rank {source.rank}", seen=str(devices))
        self._device = devices.pop()
        self._backend = backend or ("gloo" if self._device.type == "cpu" else "nccl")
        if self._backend == "nccl" and self._device.type == "cpu":
            raise TransportError("nccl carries device tensors only", where=f"rank {source.rank}", fix="backend gloo")
        self._source, self._names = source, list(source.buffers)
        self._host, self._deadline = host, timedelta(seconds=deadline_s)
        try:
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=self._deadline)
        except _GONE as cause:
            raise TransportError("the rendezvous cannot be opened", where=f"{host}:{port}", seen=str(cause)) from cause
        self._token = secrets.token_hex(8)
        store.set("token", self._token)
        self._store: TCPStore | None = store
        self._port = store.port
        self._groups: dict[int, Any] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def records(self) -> dict[str, dict[str, Any]]:
        """Each buffer's dtype, numel and rendezvous."""
        handle = {
            "host": self._host,
            "port": self._port,
            "token": self._token,
            "backend": self._backend,
            "deadline_s": self._deadline.total_seconds(),
        }
        return {
            name: {
                "dtype": dtype_name(buffer.dtype),
                "numel": buffer.numel(),
                "handle": {**handle, "index": self._names.index(name)},
            }
            for name, buffer in self._source.buffers.items()
        }

    def serve(self, control: ControlReader) -> None:
        """Answer workers from now on, in a thread."""
        self._thread = threading.Thread(
            target=self._answer_all, args=(control, self._store), name="vime-sync-send", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)  # a thread that waits in C++ while the interpreter goes away aborts the process

    def _answer_all(self, control: ControlReader, store: TCPStore) -> None:
        number = 1
        while not self._closing.is_set():
            key = f"request-{number}"
            try:
                store.wait([key], _POLL)
            except _GONE:
                continue  # nobody asked
            request = store.get(key).decode()
            store.delete_key(key)
            number += 1
            member, _, what = request.partition(" ")
            if not self._known(member, what):
                # Of a worker that was given up, or no request at all. Who asked is told by its own deadline.
                logger.warning("vime-sync: a request that nobody can answer is left out: %s", request[:80])
                continue
            try:
                with _on(self._device):
                    self._answer(int(member), what, control, store)
            except _GONE:
                # The worker's own deadline tells it; the next one must not wait for it.
                logger.exception("vime-sync: a request could not be answered: %s", request)
                self._groups.pop(int(member), None)

    def _known(self, member: str, what: str) -> bool:
        """Whether a request is one: anybody who reaches the store may write what looks like one."""
        if not member.isdecimal():
            return False
        if what in ("join", "leave"):
            return True
        return int(member) in self._groups and (
            what == "control" or (what.isdecimal() and int(what) < len(self._names))
        )

    def _answer(self, member: int, what: str, control: ControlReader, store: TCPStore) -> None:
        if what == "leave":
            self._groups.pop(member, None)
            return
        if what == "join":
            self._groups[member] = _group(self._backend, store, member, 0, self._deadline)
            return
        if what == "control":
            sent = torch.tensor(control.words(), dtype=torch.int64, device=self._device)
        else:
            sent = self._source.buffers[self._names[int(what)]].detach()
        group = self._groups[member]
        _wait(group, group.send([sent], 1, 0), self._device, self._deadline)

    def flush(self) -> None:
        """Wait for what the trainer's device still writes; the buffers are sent from where they are."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Stop answering, and give the port up: who asks from now on is refused at once."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._deadline.total_seconds() + 2 * _POLL.total_seconds())
        self._groups.clear()
        self._store = None


class _Link:
    """A worker's end of its group with one trainer rank."""

    def __init__(self, rank: int, handle: Mapping[str, Any], device: torch.device) -> None:
        self.rank, self.device = rank, device
        try:
            host, port, token = str(handle["host"]), int(handle["port"]), str(handle["token"])
            self.deadline = timedelta(seconds=float(handle["deadline_s"]))
            backend = str(handle["backend"])
        except (KeyError, TypeError, ValueError) as cause:
            raise TransportError("malformed handle", where=f"rank {rank}", seen=repr(handle)[:80]) from cause
        if (backend == "gloo") != (device.type == "cpu"):
            raise TransportError(
                "the engine's device does not suit the trainer's backend",
                where=f"trainer rank {rank}",
                seen=f"{backend}, {device}",
                fix="gloo between CPUs, nccl between GPUs",
            )
        try:
            with socket.create_connection((host, port), timeout=min(self.deadline.total_seconds(), 5.0)):
                pass  # the store's own constructor would retry until its deadline
            self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self.deadline)
            known = self.store.get("token").decode()
        except (*_GONE, OSError) as cause:
            raise StaleSourceError(
                "the trainer does not answer", where=f"rank {rank}, {host}:{port}", seen=str(cause)
            ) from cause
        if known != token:
            raise StaleSourceError("another trainer answers", where=f"rank {rank}, {host}:{port}")
        self.member = int(self.store.add("members", 1))
        self._ask("join")
        try:
            self.group = _group(backend, self.store, self.member, 1, self.deadline)
        except _GONE as cause:
            raise StaleSourceError(
                "the trainer did not join the group", where=f"rank {rank}", seen=str(cause)
            ) from cause

    def _ask(self, what: str) -> None:
        number = self.store.add("requests", 1)
        self.store.set(f"request-{number}", f"{self.member} {what}")

    def receive(self, what: str, into: torch.Tensor) -> None:
        """Ask for something and wait for it."""
        try:
            self._ask(what)
            with _on(self.device):
                _wait(self.group, self.group.recv([into], 0, 0), self.device, self.deadline)
        except _GONE as cause:
            raise StaleSourceError(
                "the trainer did not send in time",
                where=f"trainer rank {self.rank}, buffer {what}",
                seen=str(cause)[:200],
                expected=f"an answer within {self.deadline.total_seconds()} s",
                fix="connect again; publish again if that rank died",
            ) from cause

    def leave(self) -> None:
        """Tell the trainer that this worker goes; one that is gone needs not be told."""
        try:
            self._ask("leave")
        except _GONE:
            logger.info("vime-sync: trainer rank %s was gone already", self.rank)


class CollectiveControl(ControlReader):
    """A control block that is asked for."""

    def __init__(self, link: _Link, pieces: int) -> None:
        """Ask over `link`."""
        self._link, self.pieces = link, pieces

    def _load(self, version: int, where: str) -> None:
        words = torch.empty(8 + 2 * self.pieces, dtype=torch.int64, device=self._link.device)
        self._link.receive("control", words)
        self._adopt(words.tolist(), self.pieces, where=where)


class CollectiveImporter:
    """Engine side; see the module's text."""

    def __init__(self, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> None:
        """Remember what is needed."""
        self._device = device
        self._records = needed_records(sources, needed)
        self._buffers: dict[BufferKey, torch.Tensor] = {}
        self._links: dict[int, _Link] = {}

    def open(self) -> Mapping[BufferKey, torch.Tensor]:
        """Join every needed rank's group, and allocate the buffers.

        Raises:
            StaleSourceError: If a rank does not answer.
            TransportError: If a handle is malformed, or does not suit this device.
        """
        for key, record in self._records.items():
            self._buffers[key] = torch.empty(int(record["numel"]), dtype=DTYPES[record["dtype"]], device=self._device)
            self._link(key[0], record)
        return self._buffers

    def _link(self, rank: int, record: Mapping[str, Any]) -> _Link:
        if rank not in self._links:
            handle = record.get("handle")
            self._links[rank] = _Link(rank, handle if isinstance(handle, dict) else {}, self._device)
        return self._links[rank]

    def control(self, source: dict[str, Any]) -> ControlReader:
        """The control block, over the group."""
        record: dict[str, Any] = next(iter(source["buffers"].values()), {})
        return CollectiveControl(self._link(int(source["rank"]), record), int(source["control"]["pieces"]))

    def fetch(self, version: int) -> None:
        """Receive every needed buffer.

        Raises:
            StaleSourceError: If a rank does not send in time.
        """
        for key, buffer in self._buffers.items():
            self._links[key[0]].receive(str(self._records[key]["handle"]["index"]), buffer)

    def close(self) -> None:
        """Leave the groups and free the buffers."""
        for link in self._links.values():
            link.leave()
        self._links.clear()
        self._buffers.clear()
