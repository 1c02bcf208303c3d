"""What a trainer reports: the numbers of a step, and the memory of each phase.

A phase's device memory is the allocator's own peak between its start and its end; host memory is what the process had
resident when it ended. Both are kept per phase as the highest seen, so a report costs nothing and may be asked for
after every step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vime_megatron.loss_scale import LossScale

if TYPE_CHECKING:
    from vime_megatron.parallel import Topology

_GIB = 2.0**30


@dataclass(frozen=True)
class StepMetrics:
    """What one optimiser step did, the same on every rank.

    Attributes:
        loss: The injected loss, summed over the global batch.
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate of this update.
        metrics: The loss's own sums.
        tokens: Tokens of the global batch, prompts included.
        seconds: Wall time of the step on this rank.
        step: Updates done so far, this one included.
        loss_scale: Loss scale of this update; ``None`` unless weights are float16.
        redos: How often the gradients were computed anew with a lower scale, since they had overflowed.
    """

    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]
    tokens: int
    seconds: float
    step: int
    loss_scale: float | None = None
    redos: int = 0


@dataclass
class TrainerState:
    """What a checkpoint continues from, besides weights and optimiser.

    Attributes:
        step: Optimiser updates done.
        loss_scale: For the next one.
    """

    step: int = 0
    loss_scale: LossScale = LossScale()  # noqa: RUF009  # it is frozen


def add_up(
    sums: Sequence[Mapping[str, Tensor]], topology: Topology, device: torch.device, failure: Exception | None = None
) -> tuple[dict[str, float], list[str]]:
    """Add the sums of all micro-batches of all ranks, in rank order and double precision.

    Args:
        sums: Scalars by name, of each micro-batch of this rank.
        topology: The ranks; all must call.
        device: Where the scalars are.
        failure: What went wrong on this rank.

    Returns:
        Totals by name, ``loss`` among them, and each rank's failure as text, empty where there was none.
    """
    mine: dict[str, float] = {}
    named = [(name, value) for values in sums for name, value in values.items()]
    values_n = [value.to(device, torch.float64).reshape(()) for _name, value in named]
    numbers = torch.stack(values_n).tolist() if named else []  # one wait for the device, not one for each
    for (name, _value), number in zip(named, numbers, strict=True):
        mine[name] = mine.get(name, 0.0) + number
    problem = "" if failure is None else f"{type(failure).__name__}: {failure}"
    answers = topology.gather((mine if topology.counts_once else {}, problem))
    totals: dict[str, float] = {"loss": 0.0}
    for theirs, _problem in answers:
        for name, value in theirs.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals, [problem for _theirs, problem in answers]


class MemoryMeter:
    """The highest memory of each phase of one rank.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without any phase."""
        self._device = device
        self._peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside; phases do not nest.

        Args:
            name: Its name in the report.
        """
        gpu = self._device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._raise(f"host_gib.{name}", resident_bytes())
            if gpu:
                self._raise(f"device_peak_gib.{name}", torch.cuda.max_memory_allocated(self._device))

    def report(self) -> dict[str, float]:
        """Return the peaks so far and what is in use now, in GiB; see :meth:`MegatronTrainer.memory`."""
        now = {"host_gib": resident_bytes() / _GIB}
        if self._device.type == "cuda":
            now["device_gib"] = torch.cuda.memory_allocated(self._device) / _GIB
            now["device_reserved_gib"] = torch.cuda.memory_reserved(self._device) / _GIB
            now["device_free_gib"] = torch.cuda.mem_get_info(self._device)[0] / _GIB
        return now | self._peaks

    def _raise(self, name: str, count: int) -> None:
        self._peaks[name] = max(self._peaks.get(name, 0.0), count / _GIB)


def resident_bytes() -> int:
    """Return the host memory that this process has resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
