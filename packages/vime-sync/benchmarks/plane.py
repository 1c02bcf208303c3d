"""The data plane alone: one process, no engine. Everything is allocated and compiled before the arm's turn."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from setting import Record, Setting, clock
from shapes import Trainer, make_trainer, piece_boxes
from vime_sync.copying import Item, Mover
from vime_sync.digest import DigestMode, digest_box
from vime_sync.kernels import Tuning

#: Ways to cut tiles (block, blocks, warps), each with and without a digest: the difference is what the digest costs.
CUTS = [(256, 8, 2), (512, 2, 4), (512, 4, 2), (512, 4, 4), (512, 8, 2), (512, 8, 4), (512, 16, 4)]
CUTS += [(1024, 2, 4), (1024, 2, 8), (1024, 4, 4), (1024, 4, 8), (1024, 8, 8)]
#: Over a fabric every cut is as good for a copy, and only the long ones differ for a digest.
PEER_CUTS = [(512, 8, 2), (512, 8, 4), (1024, 8, 4), (1024, 8, 8), (4096, 8, 16)]
PASSES = 2


@dataclass
class Tried:
    """A way to cut tiles.

    Attributes:
        tuning: It.
        digest: Whether it is tried with a full digest or with none.
        mover: Bound and compiled.
        times: Milliseconds, over all passes.
    """

    tuning: Tuning
    digest: DigestMode
    mover: Mover
    times: list[float]

    @property
    def case(self) -> str:
        """Its row."""
        return f"tuning {self.tuning.block}x{self.tuning.blocks} warps {self.tuning.warps}, digest {self.digest}"


def _items(trainer: Trainer, target: torch.Tensor) -> list[Item]:
    return [
        Item(
            trainer.source.view(region), target.as_strided(region.shape, region.strides, region.offset), box, full, name
        )
        for name, box, full, region in piece_boxes(trainer.source)
    ]


def _verify(record: Record, items: list[Item], mover: Mover, device: torch.device) -> None:
    """The kernel's copy is bitwise the source, and its digests are those that torch computes.

    Raises:
        RuntimeError: If not.
    """
    for item in items:
        item.target.zero_()
    digests = mover.run(digest="full", phase=0)
    equal = all(torch.equal(item.source.to(device), item.target) for item in items)
    chosen = [0, *range(1, min(12, len(items))), len(items) - 1]
    same = all(
        digests[i].from_tensor(digest_box(items[i].source, items[i].box, items[i].full, items[i].name)) == digests[i]
        for i in chosen
    )
    record.note(bitwise_equal=equal, digests_equal_torch=same, plain_slices=mover.plain, slices=len(items))
    if not (equal and same):
        raise RuntimeError("the kernel copies or digests other bytes: its speed says nothing")


def kernel(setting: Setting, source: torch.device, target: torch.device, *, sweep: bool) -> None:
    """Copy a model's slices from one buffer to another, in every way."""
    record = setting.record
    trainer = make_trainer(setting.shape, source)
    into = torch.zeros_like(trainer.flat, device=target)
    size, items = trainer.source.nbytes, _items(trainer, into)
    plain, mover = Mover(items, target, "torch"), Mover(items, target, "triton")
    modes: tuple[DigestMode, ...] = ("off", "sampled", "full")
    for mode in modes:
        mover.prepare(mode)
    mover.prepare("full", write=False)
    tried = _tried(items, target, peer=source != target) if sweep else []
    setting.ready()
    record.row("one copy of the whole buffer", clock(lambda: into.copy_(trainer.flat), 10), size)
    record.row("torch, digest off", clock(functools.partial(plain.sums, digest="off", phase=1), 10), size)
    for mode in modes:
        times = clock(functools.partial(mover.sums, digest=mode, phase=1), 15, warm=3)
        record.row(f"triton, digest {mode}", times, size)
    times = clock(functools.partial(mover.sums, digest="full", phase=1, write=False), 15, warm=3)
    record.row("triton, digest only", times, size)
    _verify(record, items, mover, target)
    _sweep(record, tried, trainer.flat, into, mover.sums(digest="full", phase=1), size)


def _tried(items: list[Item], device: torch.device, *, peer: bool) -> list[Tried]:
    """Compile all that a sweep tries."""
    cuts = PEER_CUTS if peer else CUTS
    if not torch.cuda.is_available():  # the interpreter runs them, slowly
        cuts = cuts[:1]
    swept: tuple[DigestMode, ...] = ("off", "full")
    asked = [(mode, Tuning(*cut)) for cut in cuts for mode in swept]
    found = [Tried(tuning, mode, Mover(items, device, "triton", tuning=tuning), []) for mode, tuning in asked]
    for one in found:
        one.mover.prepare(one.digest)
    return found


def _sweep(
    record: Record, tried: list[Tried], flat: torch.Tensor, into: torch.Tensor, sums: np.ndarray, nbytes: int
) -> None:
    """Time each way in several passes, there and back, so that what drifts drifts for all; and prove each right."""
    repeats, warm = (6, 2) if torch.cuda.is_available() else (1, 0)
    for index in range(PASSES):
        for one in tried if index % 2 == 0 else reversed(tried):
            one.times += clock(functools.partial(one.mover.sums, digest=one.digest, phase=1), repeats, warm=warm)
    wrong = []
    for one in tried:
        record.row(one.case, one.times, nbytes)
        into.zero_()
        found = one.mover.sums(digest=one.digest, phase=1)
        if not torch.equal(flat.to(into.device), into) or (one.digest == "full" and not np.array_equal(found, sums)):
            wrong.append(one.case)
    record.note(swept=len(tried), swept_wrong=wrong)
