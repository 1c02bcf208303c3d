"""What a receiver keeps of a connected trainer, and of an update on its way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vime_sync.agree import Share
from vime_sync.control import ControlReader
from vime_sync.copying import Copier, CopyProgram, whole_part
from vime_sync.digest import Digest, DigestMode, digest_tensor
from vime_sync.errors import AliasError, DigestError, TransactionError
from vime_sync.layout import CheckpointTensor
from vime_sync.model import Anchors, Model
from vime_sync.plan import Plan
from vime_sync.striping import Part, localised, striped
from vime_sync.tally import Tally
from vime_sync.transports import BufferKey, Importer, KnowsPlaces, make_importer, open_control

Mode = Literal["shadow", "undo", "direct", "alias"]
MODES: tuple[Mode, ...] = ("shadow", "undo", "direct", "alias")


Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Connection:
    """A connected trainer.

    Attributes:
        session: The controller's session.
        owner: The controller's process.
        plan: Where every slice goes.
        mode: How a commit writes; see `vime_sync.receiver`.
        importer: Brings the bytes here.
        buffers: The trainer's buffers, as the importer presents them.
        controls: Each trainer rank's control block.
        anchors: Where each live tensor was when the plan was made.
        pieces: For each checkpoint tensor the (rank, index) of its published digests.
        share: What this worker vouches for.
        copier: How slices are moved.
        parts: For each copy where its rows are read.
        program: The copies into live memory, resolved once; None where each update has a target of its own.
        undo: Host memory for the old bytes (mode ``undo``).
        tally: Adds up digests.
    """

    session: str
    owner: Any
    plan: Plan
    mode: Mode
    importer: Importer
    buffers: Mapping[BufferKey, torch.Tensor]
    controls: Mapping[int, ControlReader]
    anchors: Anchors
    pieces: Mapping[str, list[tuple[int, int]]]
    share: Share
    copier: Copier
    parts: Sequence[Sequence[Part]]
    program: CopyProgram | None = None
    undo: dict[str, torch.Tensor] = field(default_factory=dict)
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        """Vouch for what the share says."""
        self.take(self.share)

    def take(self, share: Share) -> None:
        """Vouch for another share, once the engine's workers have agreed."""
        self.share, self.tally = share, Tally(self.plan, self.pieces, share)

    def bind(self, model: Model, manifest: Mapping[str, Any]) -> None:
        """Resolve the copies into live memory once, and compile what they need now rather than in a pause."""
        if self.mode == "shadow":
            return
        live = model.live()
        into = {name: live[name].data for name in self.plan.live_names}
        self.program = self._program(into, model.device)
        for mode in {str(source.get("digest", "full")) for source in manifest["sources"]}:
            digest: DigestMode = "off" if mode == "off" else "sampled" if mode == "sampled" else "full"
            self.program.mover.prepare(digest, write=self.mode != "alias")

    def _program(self, into: Mapping[str, torch.Tensor], device: torch.device) -> CopyProgram:
        return CopyProgram(self.plan, self.buffers, into, device=device, copier=self.copier, parts=self.parts)

    def require(self, digest: str) -> None:
        """Refuse if what the trainer published for this version is not what was served as this version.

        Args:
            digest: What was served; empty to ask for nothing.

        Raises:
            DigestError: If it is not that.
        """
        if not digest:
            return
        found = {rank: control.sums() for rank, control in self.controls.items()}
        digested = all(mode != "off" for mode, _, _ in found.values())
        expected = self.tally.expected({rank: sums for rank, (_, _, sums) in found.items()})
        total = str(Digest.total(expected)) if digested else "no digest"
        if total != digest:
            raise DigestError(
                "the trainer publishes other bytes for this version than those that were served",
                where=f"trainer ranks {sorted(self.controls)}",
                seen=total,
                expected=digest,
                fix="stage a newer version and update() to it",
            )

    def transfer(
        self, into: Mapping[str, torch.Tensor], sequences: Mapping[int, int], device: torch.device
    ) -> dict[str, Any]:
        """Copy the plan's slices, and compare what landed with what was published.

        Args:
            into: Where to, for a mode whose targets are made anew; else the program has them.
            sequences: Each control block's sequence when it was checked.
            device: Where the copies run.

        Returns:
            ``digest_mode``, ``copy_seconds``, and unless digests are off ``sum`` and ``expected`` (JSON).

        Raises:
            StaleSourceError: If a publisher wrote meanwhile.
            DigestError: If this worker alone can say that the bytes are others.
        """
        found = {rank: control.sums() for rank, control in self.controls.items()}
        mode, phase = next(((m, p) for m, p, _ in found.values()), ("off", 0))
        program = self.program or self._program(into, device)
        started = time.perf_counter()
        sums = program.sums(digest=mode, phase=phase, write=self.mode != "alias")
        reply: dict[str, Any] = {"digest_mode": mode, "copy_seconds": time.perf_counter() - started}
        for rank, control in self.controls.items():
            control.recheck(sequences[rank], where=f"trainer rank {rank}")
        if mode == "off":
            return reply
        expected = self.tally.expected({rank: published for rank, (_, _, published) in found.items()})
        landed = self.tally.landed(sums)
        if self.share.local:
            self.tally.compare(landed, expected)
        return {**reply, "sum": str(Digest.total(landed)), "expected": str(Digest.total(expected))}

    def assembled(self, mode: DigestMode, phase: int, published: Mapping[int, list[Digest]]) -> Weights:
        """The checkpoint tensors that the engine's own loaders need, whole, each compared with what was published.

        Args:
            mode: How much was digested.
            phase: With which phase.
            published: Each rank's digests.

        Yields:
            Name and tensor, one at a time.

        Raises:
            DigestError: Before a tensor is handed on of which the bytes are not those that were published.
        """
        for tensor in self.plan.feeds:
            parts = [(p.box, self.buffers[(p.region.rank, p.region.buffer)], p.region) for p in tensor.pieces]
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=parts[0][1].device)
            for box, buffer, region in parts:
                at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
                full[at].copy_(buffer.as_strided(region.shape, region.strides, region.offset))
            if mode != "off":
                ours = digest_tensor(full, tensor.name, mode=mode, phase=phase)
                theirs = sum((published[rank][index] for rank, index in self.pieces[tensor.name]), Digest())
                if ours != theirs:
                    raise DigestError(
                        "bytes that arrived are not those that were published",
                        where=f"tensor {tensor.name}",
                        seen=str(ours),
                        expected=str(theirs),
                    )
            yield tensor.name, full


@dataclass
class Staged:
    """An update on its way.

    Attributes:
        version: Where it leads.
        sequences: Each control block's sequence when it was checked.
        shadow: The new bytes (mode ``shadow``).
        undo: The old bytes (mode ``undo``).
        clean: Whether the live bytes were a whole version before it.
        digest: What was written.
    """

    version: int
    sequences: Mapping[int, int]
    shadow: Mapping[str, torch.Tensor] = field(default_factory=dict)
    undo: Mapping[str, torch.Tensor] = field(default_factory=dict)
    clean: bool = True
    digest: str = ""


@dataclass(frozen=True)
class Reached:
    """The trainer, as far as a worker reaches it.

    Attributes:
        plan: What will be read, from the nearest holder where several are known.
        parts: For each copy where its rows are read.
        importer: Brings the bytes here.
        buffers: The trainer's buffers.
        controls: Each trainer rank's control block.
    """

    plan: Plan
    parts: Sequence[Sequence[Part]]
    importer: Importer
    buffers: Mapping[BufferKey, torch.Tensor]
    controls: Mapping[int, ControlReader]


def reach(model: Model, plan: Plan, tensors: Sequence[CheckpointTensor], manifest: dict[str, Any]) -> Reached:
    """Map the trainer's buffers and control blocks; an aliased engine has them already.

    Args:
        model: The engine's model.
        plan: What will be read.
        tensors: The manifest's tensors.
        manifest: A checked manifest.

    Returns:
        What was reached.

    Raises:
        AliasError: If the engine runs on other memory than the manifest's.
        TransportError: If the trainer cannot be reached.
    """
    binding = model.alias()
    if binding is not None:
        binding.require(manifest)
        plan = localised(plan, tensors, binding.places)
        binding.check(plan, model.live())
        whole = [[whole_part(copy)] for copy in plan.copies]
        return Reached(plan, whole, binding.importer, binding.buffers, binding.controls)
    fed = {(piece.region.rank, piece.region.buffer) for tensor in plan.feeds for piece in tensor.pieces}
    needed = fed | {(copy.source.rank, copy.source.buffer) for copy in plan.copies}
    importer = make_importer(manifest["transport"], manifest["sources"], needed, model.device)
    try:
        places = importer.places() if isinstance(importer, KnowsPlaces) and _replicated(tensors) else {}
        plan = localised(plan, tensors, places)
        parts = striped(plan, tensors, places) if places else [[whole_part(copy)] for copy in plan.copies]
        if isinstance(importer, KnowsPlaces) and places:
            importer.narrow(fed | {(p.source.rank, p.source.buffer) for found in parts for p in found})
        buffers = importer.open()
        controls = {int(source["rank"]): open_control(importer, source) for source in manifest["sources"]}
    except BaseException:
        importer.close()  # ranks that did answer are let go, and what was allocated for them is freed
        raise
    return Reached(plan, parts, importer, buffers, controls)


def _replicated(tensors: Sequence[CheckpointTensor]) -> bool:
    return any(piece.replicas for tensor in tensors for piece in tensor.pieces)


def choose_mode(model: Model, asked: str, plan: Plan) -> Mode:
    """Decide how a commit writes.

    Args:
        model: The engine's model.
        plan: What will be written.
        asked: ``"auto"`` or one of `MODES`.

    Returns:
        ``alias`` for an engine that was started so; otherwise what was asked, and for ``auto`` a shadow on a CPU and a
        direct copy on a GPU.

    Raises:
        AliasError: If aliasing was asked of an engine of the other kind.
        TransactionError: If the name is unknown.
    """
    aliased = model.alias() is not None
    if plan.reload and (asked == "undo" or aliased):
        raise TransactionError(
            "what the engine loads again cannot be taken back, or aliased",
            where=next(iter(plan.reload)),
            seen=f"mode {asked!r} with reload=True",
            expected="auto, shadow or direct",
        )
    if asked not in ("auto", *MODES):
        raise TransactionError("unknown mode", seen=repr(asked), expected=f"auto, {', '.join(MODES)}")
    if asked != "auto" and aliased != (asked == "alias"):
        raise AliasError(
            "an engine is aliased from its start, or never",
            where=f"engine worker {model.rank}",
            seen=f"mode {asked!r}, weights {'aliased' if aliased else 'of its own'}",
            fix='start the engine with engine_arguments(weights="alias", manifest=PATH)',
        )
    if aliased:
        return "alias"
    if asked == "auto":
        return "shadow" if model.device.type == "cpu" else "direct"
    return next(mode for mode in MODES if mode == asked)
