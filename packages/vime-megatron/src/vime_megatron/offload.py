"""Room for a neighbour on the same GPU: gradients and optimiser state move to pinned host memory and back.

A tensor is moved by its storage: the bytes are copied out, the storage is shrunk to nothing, and everything that views
it (Megatron's buckets, ``param.main_grad``, the optimiser's parameters) stays valid and finds its numbers again when
the storage has grown and been filled. Gradients are not copied, since every step starts by clearing them; they come
back as zeros.

Weights stay: an engine on the same GPU may be running on them, and addresses that a weight source has given out must
hold. They can be moved only while no source has been asked for.

The host copy lies in slabs of a power of two bytes, because the pinned allocator rounds each request up to one, and is
kept for the next time: pinning costs far more than copying.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vime_megatron.errors import TrainerError

Movable = Literal["gradients", "optimizer", "weights"]
MOVABLE: tuple[Movable, ...] = ("gradients", "optimizer", "weights")

_SLAB_BYTES = 1 << 30


@dataclass(frozen=True)
class MoveReport:
    """What one offload or onload did on this rank.

    Attributes:
        what: What was moved.
        bytes_copied: Bytes that crossed between device and host.
        bytes_dropped: Bytes of gradients, released or taken back without a copy.
        device_bytes: Change of the device's free memory as its driver reports it: freed (positive) or taken (negative).
            0 on a CPU.
        seconds: Wall time, device included.
        pinned_bytes: Host memory held for the copies.
    """

    what: tuple[str, ...]
    bytes_copied: int
    bytes_dropped: int
    device_bytes: int
    seconds: float
    pinned_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


@dataclass
class _Moved:
    """Storages of one kind that are away."""

    tensors: list[Tensor]
    sizes: list[int]
    copied: bool
    slabs: list[Tensor] = field(default_factory=list)


class Parking:
    """The host side of one rank's offloaded state.

    Args:
        device: Where the state lives when it is at home.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with nothing away and nothing pinned."""
        self._device = device
        self._away: dict[str, _Moved] = {}
        self._spare: list[Tensor] = []
        self._pinned = 0

    @property
    def away(self) -> tuple[str, ...]:
        """What is on the host now."""
        return tuple(self._away)

    def report(self) -> dict[str, float]:
        """Return what is away and what is pinned, in GiB."""
        away = sum(sum(moved.sizes) for moved in self._away.values() if moved.copied)
        return {"offloaded_gib": away / 2**30, "pinned_gib": self._pinned / 2**30}

    def out(self, groups: dict[str, list[Tensor]]) -> MoveReport:
        """Release device memory.

        Args:
            groups: Tensors by kind; ``gradients`` are dropped, the others copied. Tensors that share a storage count
                once.

        Returns:
            What was done.

        Raises:
            TrainerError: The host memory cannot be had; nothing was moved.
        """
        started, before = time.perf_counter(), self._free()
        copied = dropped = 0
        leaving = {kind: _moved(kind, tensors) for kind, tensors in groups.items()}
        self._reserve([moved for moved in leaving.values() if moved.copied])
        for kind, moved in leaving.items():
            self._leave(moved)
            self._away[kind] = moved
            if moved.copied:
                copied += sum(moved.sizes)
            else:
                dropped += sum(moved.sizes)
        return self._report(groups, copied, dropped, before, started)

    def back(self, kinds: Sequence[str]) -> MoveReport:
        """Take device memory again and fill it.

        Args:
            kinds: What to bring home.

        Returns:
            What was done.
        """
        started, before = time.perf_counter(), self._free()
        copied = dropped = 0
        for kind in sorted(kinds, key=lambda kind: not self._away[kind].copied):  # zeros are laid while copies run
            moved = self._away[kind]
            if moved.copied:
                for part, host in _pieces(_grown(moved), moved.slabs):
                    part.copy_(host, non_blocking=True)
                copied += sum(moved.sizes)
            else:
                for tensor in _grown(moved):
                    _bytes(tensor).zero_()
                dropped += sum(moved.sizes)
        self._synchronize()
        for kind in kinds:
            self._spare += self._away.pop(kind).slabs
        return self._report(kinds, copied, dropped, before, started)

    def _reserve(self, leaving: Sequence[_Moved]) -> None:
        """Give each the slabs that its bytes need, all of them before anything moves."""
        counts = [-(-sum(moved.sizes) // _SLAB_BYTES) for moved in leaving]
        pin = self._device.type == "cuda"
        while len(self._spare) < sum(counts):
            try:
                self._spare.append(torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=pin))
            except RuntimeError as error:
                raise TrainerError(
                    "no host memory to offload to",
                    where=f"{self._pinned / 2**30:.0f} GiB are held, {sum(counts)} are needed at once",
                    seen=str(error).splitlines()[0],
                    expected="memory that can be pinned",
                    fix="nothing was moved: raise the host's or container's memory limit, or offload gradients only",
                ) from error
            self._pinned += _SLAB_BYTES
        for moved, count in zip(leaving, counts, strict=True):
            moved.slabs = [self._spare.pop() for _ in range(count)]

    def _leave(self, moved: _Moved) -> None:
        if moved.copied:
            for part, host in _pieces(moved.tensors, moved.slabs):
                host.copy_(part, non_blocking=True)
        self._synchronize()
        for tensor in moved.tensors:
            tensor.untyped_storage().resize_(0)

    def _free(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _report(self, what: Iterable[str], copied: int, dropped: int, before: int, started: float) -> MoveReport:
        freed = self._free() - before
        return MoveReport(tuple(what), copied, dropped, freed, time.perf_counter() - started, self._pinned)


def _moved(kind: str, tensors: Iterable[Tensor]) -> _Moved:
    """Describe storages of one kind that are about to leave."""
    distinct = _distinct(tensors)
    return _Moved(distinct, [tensor.untyped_storage().nbytes() for tensor in distinct], copied=kind != "gradients")


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Keep one tensor for each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor's whole storage as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _grown(moved: _Moved) -> Iterator[Tensor]:
    """Give storages their size again, each when it is asked for: the driver allocates one while others are copied."""
    for tensor, size in zip(moved.tensors, moved.sizes, strict=True):
        tensor.untyped_storage().resize_(size)
        yield tensor


def _pieces(tensors: Iterable[Tensor], slabs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Lay storages end to end over the slabs; a storage may span several."""
    at = 0
    for tensor in tensors:
        flat = _bytes(tensor)
        done = 0
        while done < flat.numel():
            slab, offset = divmod(at, _SLAB_BYTES)
            count = min(flat.numel() - done, _SLAB_BYTES - offset)
            yield flat[done : done + count], slabs[slab][offset : offset + count]
            done += count
            at += count


def check_kinds(what: Sequence[str], away: Sequence[str], *, leaving: bool) -> tuple[str, ...]:
    """Refuse kinds that are unknown or not where they should be.

    Args:
        what: Kinds asked for.
        away: Kinds on the host now.
        leaving: Whether they shall leave the device or return.

    Returns:
        The kinds, each once.

    Raises:
        TrainerError: Nothing was moved.
    """
    kinds = tuple(dict.fromkeys(what))
    wrong = [kind for kind in kinds if kind not in MOVABLE or (kind in away) == leaving]
    if wrong:
        raise TrainerError(
            "cannot offload" if leaving else "cannot onload",
            where=", ".join(map(repr, wrong)),
            seen=f"on the host now: {', '.join(away) or 'nothing'}",
            expected=f"kinds among {', '.join(MOVABLE)} that are {'on the device' if leaving else 'on the host'}",
        )
    return kinds
