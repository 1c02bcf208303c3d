"""Measuring a transport without an inference engine: a trainer process, a worker process, the real transaction.

The worker has the real `Receiver` over a model that is nothing but live parameters in an engine's layout (fused
``[q; k; v]`` and ``[gate; up]``). So planning, copying, verifying and committing are what an engine does; the HTTP
server, the scheduler and the pause are left out. A round is timed in the trainer, from asking the worker to stage until
it has answered the commit; staging in the trainer (where the transport copies there) is timed apart.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vime_sync.aliasing import AliasBinding, bind
from vime_sync.errors import EngineError, TransportError, from_wire
from vime_sync.layout import CheckpointTensor, Piece, Region, contiguous_strides, whole
from vime_sync.manifest import Manifest
from vime_sync.publisher import Publisher
from vime_sync.receiver import Receiver
from vime_sync.source import WeightSource
from vime_sync.transports.shm import shared_empty

#: Command-line names of transports: the transport, the options of its exporter.
TRANSPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shm": ("shm", {}),
    "ipc": ("ipc", {}),
    "gloo": ("collective", {"backend": "gloo"}),
    "nccl": ("collective", {"backend": "nccl"}),
    "disk": ("disk", {}),
    "delta": ("delta", {}),
}
_ALIGN = 128
_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Shape:
    """A dense decoder, by the sizes that decide its bytes.

    Attributes:
        layers: Number of layers.
        hidden: Width of the residual stream.
        inner: Width of the MLP.
        q: Rows of the query projection.
        kv: Rows of the key projection, and of the value projection.
        words: Vocabulary; the embedding and the output head are separate.
    """

    layers: int
    hidden: int
    inner: int
    q: int
    kv: int
    words: int

    def fused(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Live tensor to the checkpoint tensors that are stacked in it."""
        h = self.hidden
        rows: dict[str, list[tuple[str, tuple[int, ...]]]] = {
            "embed": [("embed", (self.words, h))],
            "norm": [("norm", (h,))],
            "head": [("head", (self.words, h))],
        }
        for layer in range(self.layers):
            at = f"layers.{layer}."
            rows |= {
                at + "qkv": [(at + "q", (self.q, h)), (at + "k", (self.kv, h)), (at + "v", (self.kv, h))],
                at + "o": [(at + "o", (h, self.q))],
                at + "gate_up": [(at + "gate", (self.inner, h)), (at + "up", (self.inner, h))],
                at + "down": [(at + "down", (h, self.inner))],
                at + "norm_1": [(at + "norm_1", (h,))],
                at + "norm_2": [(at + "norm_2", (h,))],
            }
        return rows

    @property
    def numel(self) -> int:
        """Elements of the checkpoint."""
        return sum(math.prod(shape) for parts in self.fused().values() for _, shape in parts)


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 2048, 1024, 151936),
    "qwen3-1.7b": Shape(28, 2048, 6144, 2048, 1024, 151936),
    "qwen3-8b": Shape(36, 4096, 12288, 4096, 1024, 151936),
}


def shape_of_size(megabytes: int, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """A shape of about the given size: as many layers of width 1024 (or 128) as fit, at least one.

    Args:
        megabytes: Millions of bytes.
        dtype: Element type.
    """
    hidden = 1024 if megabytes >= 64 else 128
    one = Shape(1, hidden, 3 * hidden, 2 * hidden, hidden, 2 * hidden)
    two = Shape(2, hidden, 3 * hidden, 2 * hidden, hidden, 2 * hidden)
    layer = two.numel - one.numel
    layers = max(1, round((megabytes * 1e6 / dtype.itemsize - one.numel) / layer) + 1)
    return Shape(layers, hidden, 3 * hidden, 2 * hidden, hidden, 2 * hidden)


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark measured.

    Attributes:
        transport: As asked for.
        mode: ``copy`` or ``alias``.
        device: Where the weights were.
        bytes: Bytes of weights.
        seconds: Stage and commit in the worker, one entry a round; the first is warm.
        publish_seconds: The trainer's side: new values, staging and digesting, one entry a round.
        connect_seconds: Planning and opening the transport, once.
        gb_per_s: Bytes over the median of `seconds`, in 1e9 bytes a second; 0 where nothing moves.
        digest_ok: Whether the worker's live bytes had the trainer's digest after every round.
    """

    transport: str
    mode: str
    device: str
    bytes: int
    seconds: list[float]
    publish_seconds: list[float]
    connect_seconds: float
    gb_per_s: float
    digest_ok: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class BenchModel:
    """Live parameters in an engine's layout, and loaders that fill them; see `vime_sync.model.Model`."""

    rank, world_size = 0, 1

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the live parameters."""
        self.device = device
        self._fused = shape.fused()
        self._place: dict[str, tuple[str, int, int]] = {}
        self._live: dict[str, torch.Tensor] = {}
        for live, parts in self._fused.items():
            row = 0
            for name, (rows, *_) in parts:
                self._place[name] = (live, row, rows)
                row += rows
            self._live[live] = torch.zeros((row, *parts[0][1][1:]), dtype=dtype, device=device)
        self._binding: AliasBinding | None = None

    def live(self) -> Mapping[str, torch.Tensor]:
        """All parameters."""
        return self._live

    def held(self, name: str) -> Mapping[str, torch.Tensor | None]:
        """The one dictionary."""
        return self._live

    def required(self) -> set[str]:
        """All parameters."""
        return set(self._live)

    def obstacles(self) -> Mapping[str, str]:
        """None: nothing is post-processed."""
        return {}

    def asleep(self) -> str:
        """Never."""
        return ""

    def alias(self) -> AliasBinding | None:
        """What `bound` bound."""
        return self._binding

    def alias_refused(self) -> str:
        """Nobody tried."""
        return ""

    def reload(self, names: Iterable[str], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load again; nothing is post-processed."""
        self.load_weights(weights)

    def bound(self, manifest: Manifest) -> dict[str, str]:
        """Make the parameters views of the trainer's buffers; a message that asks for the state."""
        self._binding = bind(self, manifest, self._live.__setitem__)
        return {"op": "state"}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each checkpoint tensor to its rows."""
        for name, tensor in weights:
            live, row, rows = self._place[name]
            self._live[live][row : row + rows].copy_(tensor)


def make_source(shape: Shape, device: torch.device, dtype: torch.dtype, *, shared: bool) -> WeightSource:
    """One flat buffer of random weights in the engine's order, described by checkpoint tensors.

    Args:
        shape: The model.
        device: Where.
        dtype: Element type.
        shared: Put CPU memory where an engine can map it.
    """
    tensors, offset = [], 0
    for parts in shape.fused().values():
        offset = -(-offset // _ALIGN) * _ALIGN
        for name, extents in parts:
            region = Region(0, "flat", offset, extents, contiguous_strides(extents))
            tensors.append(CheckpointTensor(name, extents, dtype, (Piece(whole(extents), region),)))
            offset += math.prod(extents)
    flat = shared_empty(offset, dtype) if shared else torch.empty(offset, dtype=dtype, device=device)
    flat.normal_(0, 0.02)
    return WeightSource.from_regions({"flat": flat}, tensors)


def run_bench(
    transport: str,
    *,
    mode: str = "copy",
    shape: Shape | None = None,
    rounds: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchResult:
    """Measure a transport between this process and a worker process.

    Args:
        transport: A key of `TRANSPORTS`.
        mode: ``"copy"`` or ``"alias"``.
        shape: The model; 256 MB by default.
        rounds: How many timed updates, after one that warms up.
        dtype: Element type.

    Returns:
        What was measured.

    Raises:
        TransportError: If the transport needs a device that is not here, or cannot alias.
        SyncError: What the transaction refused.
    """
    if transport not in TRANSPORTS:
        raise TransportError("unknown transport", seen=repr(transport), expected=", ".join(TRANSPORTS))
    if mode not in ("copy", "alias") or (mode == "alias" and transport not in ("shm", "ipc")):
        raise TransportError("this cannot be measured", seen=f"{transport}, {mode}", expected="copy; alias on shm, ipc")
    gpus = torch.cuda.device_count()
    needed = {"ipc": 1, "nccl": 2}.get(transport, 0)
    if gpus < needed:
        raise TransportError(
            "there are not enough GPUs here", where=transport, seen=f"{gpus} GPUs", expected=f"{needed} or more"
        )
    device = torch.device("cuda:0" if needed else "cpu")
    chosen = shape or shape_of_size(256, dtype)
    source = make_source(chosen, device, dtype, shared=transport == "shm")
    name, options = TRANSPORTS[transport]
    with TemporaryDirectory(prefix="vime-bench-") as folder:
        extra = {"folder": folder} if name in ("disk", "delta") else {}
        publisher = Publisher(source, name, options={**options, **extra})
        try:
            worker = _Worker(chosen, f"cuda:{needed - 1}" if needed else "cpu", dtype)
            try:
                return _measure(publisher, worker, transport, mode, rounds)
            finally:
                worker.stop()
        finally:
            publisher.close(force=True)


class _Worker:
    """A process with a receiver over a `BenchModel`, spoken to in JSON."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        fresh = multiprocessing.get_context("spawn")
        self._pipe, theirs = fresh.Pipe()
        self._process = fresh.Process(target=_worker_main, args=(theirs, shape, device, dtype), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
            if not self._pipe.poll(_DEADLINE_S):
                raise EngineError("the worker did not answer in time", where=str(message.get("op")))
            reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as cause:
            raise EngineError("the worker died", where=str(message.get("op")), seen=str(cause)) from cause
        if not reply["ok"]:
            raise from_wire(reply, where="bench worker")
        return reply

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(10)


def _worker_main(pipe: Pipe, shape: Shape, device: str, dtype: torch.dtype) -> None:
    """The worker process."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    model = BenchModel(shape, torch.device(device), dtype)
    receiver = Receiver(model)
    while True:
        message = json.loads(pipe.recv_bytes())
        reply = receiver.handle(model.bound(message["bind"]) if "bind" in message else message)
        pipe.send_bytes(json.dumps(reply).encode())


def _measure(publisher: Publisher, worker: _Worker, transport: str, mode: str, rounds: int) -> BenchResult:
    """Stage, commit and compare, `rounds` times after one that warms up."""
    manifest, source = publisher.manifest(), publisher.source
    publisher.stage(0)
    if mode == "alias":
        worker.ask({"bind": manifest})
    started = time.perf_counter()
    reply = worker.ask({"op": "connect", "session": "bench", "manifest": manifest, "mode": "auto"})
    connect_seconds = time.perf_counter() - started
    seconds, published, good = [], [], True
    flat = source.buffers["flat"]
    for version in range(1, rounds + 2):
        message = {"session": "bench", "version": version, "base": reply["version"]}
        if mode == "alias":
            worker.ask({"op": "open", **message})
        started = time.perf_counter()
        with publisher.writing(version):
            flat.mul_(-1.0)  # every element changes, and none grows
        published.append(time.perf_counter() - started)
        started = time.perf_counter()
        staged = worker.ask({"op": "stage", **message})
        reply = worker.ask({"op": "commit", **message, "digest": staged.get("sum", "")})
        seconds.append(time.perf_counter() - started)
        good = good and reply["digest"] == publisher.staged_digest
    middle = sorted(seconds[1:])[rounds // 2]
    return BenchResult(
        transport=transport,
        mode=mode,
        device=str(flat.device),
        bytes=source.nbytes,
        seconds=[round(s, 6) for s in seconds[1:]],
        publish_seconds=[round(s, 6) for s in published[1:]],
        connect_seconds=round(connect_seconds, 6),
        gb_per_s=0.0 if mode == "alias" else round(source.nbytes / middle / 1e9, 3),
        digest_ok=good,
    )
