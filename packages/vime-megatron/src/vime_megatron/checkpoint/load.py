"""Loading: from any layout into any layout, all of it or an error that lists what does not fit.

Files are compared with their checksums before anything is read, and the names and shapes of the stored tensors with
those that this model needs. Then every rank fills its own boxes. In the layout that wrote the checkpoint training goes
on bit for bit, random states included; in another it goes on up to rounding, with fresh random states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vime_megatron.checkpoint.folders import check_files, find
from vime_megatron.checkpoint.pieces import MODEL, OPTIMIZER, RANDOM, Inventory, OptimizerSlot, Piece
from vime_megatron.checkpoint.save import identity, layout
from vime_megatron.checkpoint.storage import Progress, Reader, read_pieces
from vime_megatron.errors import CheckpointError
from vime_megatron.families.mapping import checkpoint_names
from vime_megatron.loss_scale import LossScale
from vime_megatron.optim import count_home, inner_optimizers

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from vime_megatron.trainer import MegatronTrainer

_LISTED = 8


def load_checkpoint(trainer: MegatronTrainer, folder: Path, progress: Progress | None) -> None:
    """Read a checkpoint; see :meth:`MegatronTrainer.load`."""
    peers = trainer.topology.peers

    def unread(problems: str) -> CheckpointError:
        fix = "nothing was loaded; give a folder on a file system that all ranks share"
        return CheckpointError("not every rank can read the checkpoint", where=str(folder), seen=problems, fix=fix)

    folder, manifest = peers.agree(partial(_find, trainer, folder), unread)
    check_files(peers, folder, manifest["files"])
    reader = Reader(folder)
    metadata = peers.agree(reader.read_metadata, unread)
    _check_tensors(trainer, folder, manifest["optimizer"], metadata)
    inventory = Inventory(trainer, copies=True)
    with torch.no_grad():
        for slot in inventory.slots:
            _make_room(slot, manifest["optimizer"])
        read_pieces(reader, metadata, (*inventory.model(), *inventory.optimizer()), progress)
        _count_updates(trainer, inventory.slots, manifest)
    trainer.scheduler.num_steps = manifest["schedule_steps"]
    trainer.state.step = manifest["step"]
    trainer.state.loss_scale = LossScale.of(trainer.config).restored(manifest.get("loss_scale"))
    if manifest["layout"] == layout(trainer):
        states = list(inventory.random())
        read_pieces(reader, metadata, states)
        _restore_random(trainer, states)


def _find(trainer: MegatronTrainer, folder: Path) -> tuple[Path, dict[str, Any]]:
    found, manifest = find(folder)
    _check_identity(trainer, found, manifest)
    return found, manifest


def _check_identity(trainer: MegatronTrainer, folder: Path, manifest: dict[str, Any]) -> None:
    different = {key: (manifest.get(key), value) for key, value in identity(trainer).items()}
    different = {key: (seen, wanted) for key, (seen, wanted) in different.items() if seen != wanted}
    if different:
        raise CheckpointError(
            "the checkpoint is of another model",
            where=str(folder),
            seen=", ".join(f"{key}={seen!r}" for key, (seen, _) in different.items()),
            expected=", ".join(f"{key}={wanted!r}" for key, (_, wanted) in different.items()),
            fix="build the trainer as the one that saved; the parallel layout may be another",
        )


def _check_tensors(trainer: MegatronTrainer, folder: Path, kinds: Sequence[str], metadata: Metadata) -> None:
    """Compare what is stored with what this model needs, all ranks' parts together."""
    names = checkpoint_names(trainer._family.rules, trainer.shape)
    wanted = {MODEL + name for name in names} | {f"{OPTIMIZER}{kind}.{name}" for kind in kinds for name in names}
    stored = {key: tuple(getattr(kept, "size", ())) for key, kept in metadata.state_dict_metadata.items()}
    found = {key for key in stored if not key.startswith(RANDOM)}
    shapes = {MODEL + place.name: place.shape for place in trainer._placed}
    reshaped = {
        f"{key} is {stored[key]}, not {shape}" for key, shape in shapes.items() if stored.get(key, shape) != shape
    }
    groups = {"missing": wanted - found, "unexpected": found - wanted, "of another shape": reshaped}
    problem = "; ".join(f"{what}: {_some(keys)}" for what, keys in groups.items() if keys)
    problems = trainer.topology.peers.failures(problem)
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the model",
            where=str(folder),
            seen=problem or problems[0],
            expected=f"the {len(wanted)} tensors of {trainer.config.model}",
            fix="nothing was loaded; give the checkpoint of this model",
        )


def _some(names: set[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def _make_room(slot: OptimizerSlot, kinds: Sequence[str]) -> None:
    """Give a slot the state tensors that will be read; rows that only pad the vocabulary start from zero."""
    kept = {kind: slot.state[kind] for kind in kinds if kind in slot.state}
    slot.state.clear()
    for kind in kinds:
        if kind != "param":
            slot.state[kind] = kept[kind] if kind in kept else torch.zeros_like(slot.master, requires_grad=False)


def _count_updates(trainer: MegatronTrainer, slots: Sequence[OptimizerSlot], manifest: dict[str, Any]) -> None:
    """Set the step counts where this optimiser keeps them: with its state, or with its groups."""
    by_group = False
    for inner in inner_optimizers(trainer.optimizer):
        for group in inner.param_groups:
            if "step" in group:
                group["step"], by_group = manifest["updates"], True
    moments = [kind for kind in manifest["optimizer"] if kind != "param"]
    if by_group or not moments:
        return
    settings = next((group for inner in inner_optimizers(trainer.optimizer) for group in inner.param_groups), {})
    for slot in slots:
        slot.state["step"] = torch.tensor(float(manifest["updates"]), device=count_home(settings, slot.master))


def _restore_random(trainer: MegatronTrainer, states: Sequence[Piece]) -> None:
    for piece in states:
        if piece.key.startswith(f"{RANDOM}cuda."):
            torch.cuda.set_rng_state(piece.data, trainer._platform.device)
        else:
            torch.random.set_rng_state(piece.data)
