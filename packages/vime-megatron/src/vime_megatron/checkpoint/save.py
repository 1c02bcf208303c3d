"""Saving: plan together, write alone, publish together; in the caller's thread or behind its back.

1. The ranks agree on who writes which box (:func:`~vime_megatron.checkpoint.storage.plan_save`).
2. Only when the save is asynchronous: each rank copies its planned boxes to host memory. From here on the trainer may
   change its weights.
3. Each rank writes and fingerprints one file.
4. Rank 0 writes the metadata and the manifest, flushes, and renames the folder to its place; then it deletes what is
   older than the newest ``keep``.

Steps 3 and 4 of an asynchronous save run in a thread, never in a forked process, and talk in a process group of their
own. A save that fails is logged at once and raised by :meth:`~vime_megatron.SaveHandle.wait`, or by the trainer's next
``save``, ``load`` or ``close`` if nobody has waited.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from vime_megatron.checkpoint.folders import (
    FORMAT,
    MANIFEST,
    check_target,
    fingerprints,
    fresh,
    keep_newest,
    numbered,
    swap_in,
    temporary_of,
    together,
)
from vime_megatron.checkpoint.handle import SaveHandle
from vime_megatron.checkpoint.pieces import Inventory, OptimizerSlot, moments_of
from vime_megatron.checkpoint.storage import Progress, SavePlanner, Writer, plan_save, write_head
from vime_megatron.errors import CheckpointError, TrainerError
from vime_megatron.peers import Peers

if TYPE_CHECKING:
    from vime_megatron.trainer import MegatronTrainer

_log = logging.getLogger(__name__)


class _Job:
    """Steps 3 and 4 of one save."""

    def __init__(self, folder: Path, planner: SavePlanner, plan: SavePlan, metadata: Metadata | None) -> None:
        self.folder, self.temporary = folder, temporary_of(folder)
        self.planner, self.plan, self.metadata = planner, plan, metadata
        self.writer = Writer(self.temporary)
        self.manifest: dict[str, Any] = {}
        self.keep: int | None = None
        self._written: tuple[list[Any], dict[str, Any]] = ([], {})

    def run(self, peers: Peers) -> None:
        """Write and publish; raises CheckpointError on every rank alike."""
        try:
            together(peers, self.folder, self._write)
            written = peers.collect(self._written)
            together(peers, self.folder, partial(self._publish, peers.rank, written))
        except CheckpointError:
            if peers.rank == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise

    def _write(self) -> None:
        results = self.writer.write_data(self.plan, self.planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        self._written = (results, fingerprints(self.temporary / name for name in names))

    def _publish(self, rank: int, written: list[tuple[list[Any], dict[str, Any]]]) -> None:
        if rank != 0:
            return
        assert self.metadata is not None
        write_head(self.temporary, self.writer, self.metadata, [results for results, _ in written], self.manifest)
        files = {name: mark for _, marks in written for name, mark in marks.items()}
        heads = [path for path in sorted(self.temporary.iterdir()) if path.name not in files]
        manifest = self.manifest | {"files": files | fingerprints(heads)}
        (self.temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        swap_in(self.temporary, self.folder)
        if self.keep is not None:
            self._delete_old(self.keep)

    def _delete_old(self, keep: int) -> None:
        """Delete what is older; the new checkpoint is published, so a failure is told but undoes nothing."""
        try:
            for path in keep_newest(self.folder, keep):
                _log.info("deleted %s: the newest %d are kept", path, keep)
        except OSError as error:
            _log.warning("older checkpoints beside %s could not be deleted: %s", self.folder, error)


def save_checkpoint(
    trainer: MegatronTrainer, folder: Path, *, asynchronous: bool, keep: int | None, progress: Progress | None
) -> SaveHandle:
    """Write a checkpoint; see :meth:`MegatronTrainer.save`."""
    if keep is not None:
        if keep < 1:
            raise TrainerError("bad number of checkpoints to keep", where="keep", seen=str(keep), expected="at least 1")
        numbered(folder)
    topology = trainer.topology
    peers = topology.peers
    temporary = temporary_of(folder)
    check_target(peers, folder, MANIFEST)
    inventory = Inventory(trainer, copies=False)
    planner = SavePlanner((*inventory.model(), *inventory.optimizer(), *inventory.random()), progress)
    plan, metadata = plan_save(peers, Writer(temporary), planner, folder)
    job = _Job(folder, planner, plan, metadata)
    job.manifest, job.keep = _describe(trainer, inventory.slots), keep
    together(peers, folder, lambda: fresh(temporary) if peers.rank == 0 else None)
    handle = SaveHandle(folder)
    if not asynchronous:
        job.run(peers)
        handle.finish()
        return handle
    planner.keep(plan)
    trainer._platform.synchronize()
    run = partial(_in_background, handle, job.run, topology.background_peers())
    threading.Thread(target=run, name=f"save {folder.name}").start()
    return handle


def _in_background(handle: SaveHandle, work: Callable[[Peers], None], peers: Peers) -> None:
    """Run the rest of a save; the thread's edge, so whatever happens ends up in the handle."""
    try:
        work(peers)
    except CheckpointError as error:
        _log.error("rank %d: %s", peers.rank, error)  # it is raised to the waiter
        handle.finish(error)
    except Exception as error:  # noqa: BLE001  # the edge of a thread; the cause is kept
        _log.exception("rank %d: saving %s failed", peers.rank, handle.folder)
        failure = CheckpointError("the save failed", where=str(handle.folder), seen=f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        handle.finish(failure)
    else:
        handle.finish()


def _describe(trainer: MegatronTrainer, slots: Iterable[OptimizerSlot]) -> dict[str, Any]:
    """Return the manifest but for its files: what the tensors do not say."""
    slots = list(slots)
    kinds = {kind for slot in slots for kind in moments_of(slot)}
    kinds |= {"param"} if any(not trainer.owns(slot.master) for slot in slots) else set()
    shared = trainer.topology.gather((sorted(kinds), sorted(updates_of(trainer, slots))))
    updates = {count for _, counts in shared for count in counts}
    if len(updates) > 1:
        raise CheckpointError("the optimiser's parameters are at different updates", seen=str(sorted(updates)))
    return {
        "format": FORMAT,
        **identity(trainer),
        "step": trainer.state.step,
        "schedule_steps": trainer.scheduler.num_steps,
        "updates": max(updates, default=0),
        "optimizer": sorted({kind for kinds_there, _ in shared for kind in kinds_there}),
        "layout": layout(trainer),
    } | ({"loss_scale": trainer.state.loss_scale.saved()} if trainer.config.dtype == "float16" else {})


def updates_of(trainer: MegatronTrainer, slots: Iterable[OptimizerSlot]) -> set[int]:
    """Return the optimiser's step counts: torch keeps one for each parameter, other optimisers one for each group."""
    counts = [slot.state["step"] for slot in slots if "step" in slot.state]
    on_device = [count for count in counts if isinstance(count, Tensor)]
    found = {int(count) for count in counts if not isinstance(count, Tensor)}
    if on_device:
        found |= {int(count) for count in torch.stack(on_device).tolist()}
    groups = getattr(trainer.optimizer, "param_groups", ())
    return found | {int(group["step"]) for group in groups if "step" in group}


def identity(trainer: MegatronTrainer) -> dict[str, Any]:
    """Return what must be the same when a checkpoint is read."""
    return {"architecture": trainer.shape.architecture, "dtype": trainer.config.dtype}


def layout(trainer: MegatronTrainer) -> dict[str, Any]:
    """Return what may differ; random states are only read where it does not."""
    config = trainer.config
    return {
        "world_size": trainer.topology.world_size,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "context_parallel": config.context_parallel,
        "expert_parallel": config.expert_parallel,
        "distributed_optimizer": config.optimizer.distributed,
        "device": trainer._platform.device.type,
    }
