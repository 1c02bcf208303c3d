"""Which trainer rank and which engine sits on which device, decided before anything starts.

Colocated, trainer ranks and engines share the node's devices: rank ``r`` owns device ``r``, and engine ``e`` of tensor
parallel size ``t`` owns devices ``e*t .. e*t + t - 1`` of the same list. Asynchronous, the pools are disjoint: the
engines' devices begin after the trainer's; with ``pipeline.pools = "shared"`` they are the same, as colocated, and each
side has its share of the memory. A CPU has no devices to hand out: processes share its cores, so what is placed there
is threads.

Masks come from vime-devices and nowhere else. On HIP a process sees its own devices first and then every other device
of the node, because an IPC handle carries the exporter's ordinal and opening it looks that ordinal up in the importer's
list; on CUDA it sees its own devices only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime_devices import Platform, child_environment, visible_devices
from vime_grpo import RunConfig

from vime_integration.errors import PlacementError


@dataclass(frozen=True)
class Seat:
    """Where one process runs.

    Attributes:
        name: Role and number, "trainer-0" or "engine-1"; also the name of its log file.
        devices: Its own devices, as entries of the node's list; empty on a CPU.
        mask: The device mask of its environment; empty on a CPU.
        local_indices: Ordinals of its own devices under that mask.
        environment: Variables that differ from the driver's.
        removed: Variables of the driver's that it must not have.
        threads: CPU threads that it may use.
    """

    name: str
    devices: tuple[str, ...]
    mask: str
    local_indices: tuple[int, ...]
    environment: Mapping[str, str]
    removed: tuple[str, ...]
    threads: int

    def describe(self) -> str:
        """Return one line for the log and the terminal."""
        place = f"devices {','.join(self.devices)} (mask {self.mask})" if self.devices else f"{self.threads} threads"
        return f"{self.name}: {place}"


@dataclass(frozen=True)
class Placement:
    """All seats of a run.

    Attributes:
        platform: Whose devices they are.
        trainers: One seat a rank, in rank order.
        engines: One seat an engine.
    """

    platform: Platform
    trainers: tuple[Seat, ...]
    engines: tuple[Seat, ...]

    def describe(self) -> list[str]:
        """Return one line a process."""
        return [seat.describe() for seat in (*self.trainers, *self.engines)]


def place(config: RunConfig, platform: Platform, environ: Mapping[str, str] | None = None) -> Placement:
    """Give every process of a run its seat.

    Args:
        config: The run's configuration; ``pipeline.mode`` decides whether trainer and engines share devices.
        platform: What the host has.
        environ: The driver's environment; by default this process's.

    Raises:
        PlacementError: The host has fewer devices than the configuration asks for.
        DeviceError: The driver's own masks contradict each other.
    """
    environ = os.environ if environ is None else environ
    node = visible_devices(platform, environ)
    separate = apart(config)
    ranks, size, count = config.trainer.world_size, config.engine.tensor_parallel, config.engine.count
    first = ranks if separate else 0  # the first engine's first device
    needed = first + count * size if separate else max(ranks, count * size)
    if platform is not Platform.CPU and len(node) < needed:
        how = "on devices of their own" if separate else "sharing devices"
        raise PlacementError(
            "not enough devices",
            seen=f"{len(node)} visible {platform.value} devices ({', '.join(node) or 'none'})",
            expected=f"{needed}: {ranks} trainer ranks, {count} engines of {size}, {how}",
            fix="lower trainer.data_parallel, engine.count or the tensor_parallel sizes, widen the mask"
            + (', or set pipeline.pools = "shared"' if separate else ""),
        )
    trainer_threads, engine_threads = _threads(config, count)

    def seat(name: str, own: Sequence[str], threads: int) -> Seat:
        child = child_environment(platform, own=own, node=node, base=environ)
        changed = {key: value for key, value in child.env.items() if environ.get(key) != value}
        return Seat(name, tuple(own), child.mask, child.local_indices, changed, tuple(child.removed), threads)

    trainers = [seat(f"trainer-{rank}", node[rank : rank + 1], trainer_threads) for rank in range(ranks)]
    engines = [
        seat(f"engine-{e}", node[first + e * size : first + (e + 1) * size], engine_threads) for e in range(count)
    ]
    return Placement(platform, tuple(trainers), tuple(engines))


def apart(config: RunConfig) -> bool:
    """Return whether trainer and engines have devices of their own."""
    return config.pipeline.mode == "async" and config.pipeline.pools == "disjoint"


def _threads(config: RunConfig, count: int) -> tuple[int, int]:
    """Return the CPU threads of a trainer rank and of an engine.

    Colocated phases alternate, so each side may use every core; otherwise they work at the same time and share them.
    """
    cores = len(os.sched_getaffinity(0))
    for_each_side = max(1, cores // 2) if config.pipeline.mode == "async" else cores
    ranks, workers = config.trainer.world_size, max(1, count * config.engine.tensor_parallel)
    trainer = config.trainer.threads or max(1, for_each_side // ranks)
    return trainer, config.engine.threads or max(1, for_each_side // workers)
