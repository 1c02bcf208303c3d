"""Checkpoints that continue bit for bit, and folders that appear only when they are complete.

A checkpoint is a folder of one safetensors and one JSON file per rank and a ``manifest.json`` written last, with the
layout and each file's size and SHA-256. It is built under a temporary name beside the target, flushed to disk, and
renamed; a target that exists is moved aside first and deleted last, and a reader falls back to it if the machine died
in between.

Optimiser state is taken from the torch optimisers inside Megatron's wrappers: their parameters (float32 masters, or a
rank's shard of them), moments and step counts, all tensors, so there is no pickle in the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vime_megatron.errors import CheckpointError
from vime_megatron.reshard import LAYOUT_KEYS, OldRanks

if TYPE_CHECKING:
    from vime_megatron.families.mapping import Placement
    from vime_megatron.parallel import Topology
    from vime_megatron.trainer import MegatronTrainer

FORMAT = 1
MANIFEST = "manifest.json"


def publish(topology: Topology, folder: Path, *phases: Callable[[Path], None]) -> None:
    """Let every rank write into a temporary folder, then make it appear as ``folder``.

    Args:
        topology: For the agreement of the ranks.
        folder: The final name.
        phases: Called one after the other with the temporary folder, on every rank; a phase starts when the one before
            has succeeded on all.

    Raises:
        CheckpointError: A rank failed; raised on all, and nothing was published.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    _together(topology, folder, lambda: _fresh(temporary) if topology.rank == 0 else None)
    try:
        for phase in phases:
            _together(topology, folder, partial(phase, temporary))
        _together(topology, folder, lambda: _swap_in(temporary, folder) if topology.rank == 0 else None)
    except CheckpointError:
        if topology.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_checkpoint(trainer: MegatronTrainer, folder: Path) -> None:
    """Write a checkpoint; see :meth:`MegatronTrainer.save`."""
    topology = trainer.topology

    def write(temporary: Path) -> None:
        name = _rank_name(topology.rank)
        tensors = {key: value.detach().cpu().contiguous() for key, value in _tensors(trainer)}
        save_file(tensors, temporary / f"{name}.safetensors")
        (temporary / f"{name}.json").write_text(json.dumps(_scalars(trainer), indent=1))

    def seal(temporary: Path) -> None:
        if topology.rank == 0:
            files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
            layouts = [asdict(layout) for layout in topology.layouts]
            manifest = {"format": FORMAT, **_identity(trainer), "step": trainer.state.step}
            manifest |= {"layouts": layouts, "files": files}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")

    publish(topology, folder, write, seal)


def load_checkpoint(trainer: MegatronTrainer, folder: Path) -> None:
    """Read a checkpoint; see :meth:`MegatronTrainer.load`."""
    folder, manifest = _find(folder)
    identity = _identity(trainer)
    different = {key: (manifest.get(key), value) for key, value in identity.items() if manifest.get(key) != value}
    if different and LAYOUT_KEYS.issuperset(different) and not trainer.config.optimizer.distributed:
        _reshard(trainer, folder, manifest)
        return
    if different:
        raise CheckpointError(
            "the checkpoint is of another model or layout",
            where=str(folder),
            seen=", ".join(f"{key}={seen!r}" for key, (seen, _) in different.items()),
            expected=", ".join(f"{key}={wanted!r}" for key, (_, wanted) in different.items()),
            fix="sizes may differ unless the optimiser is distributed; else export_hf from the layout that wrote it",
        )
    name = _rank_name(trainer.topology.rank)
    _check_files(folder, manifest, (f"{name}.safetensors", f"{name}.json"))
    try:
        tensors = load_file(folder / f"{name}.safetensors")
    except SafetensorError as error:
        raise CheckpointError("a checkpoint file is damaged", where=f"{folder}/{name}", seen=str(error)) from error
    _restore(trainer, tensors, json.loads((folder / f"{name}.json").read_text()))


def _check_files(folder: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Compare files with the manifest's checksums."""
    for file in names:
        path, recorded = folder / file, manifest["files"].get(file)
        seen = _fingerprint(path) if path.is_file() else None
        if seen != recorded or recorded is None:
            expected = str(recorded)
            raise CheckpointError("a checkpoint file is damaged", where=str(path), seen=str(seen), expected=expected)


def _reshard(trainer: MegatronTrainer, folder: Path, manifest: dict[str, Any]) -> None:
    """Read weights and optimiser from the files of another layout's ranks; see :mod:`vime_megatron.reshard`."""
    _check_files(folder, manifest, sorted(manifest["files"]))
    old = OldRanks(folder, manifest.get("layouts"), trainer._family.rules, trainer.shape, _rank_name)
    mine: dict[str, list[Placement]] = {}
    for place in trainer._placed:
        mine.setdefault(place.param, []).append(place)
    names = _slot_names(trainer)
    with torch.no_grad():
        for name, param in trainer.params.items():
            old.fill(param.data, mine[name], lambda _rank, source: f"model.{source}")
        for key, master, state in _optimizer_slots(trainer):
            places = mine[names[key]]
            if not trainer.owns(master):
                old.fill(master.data, places, lambda rank, source: f"{old.slot(rank, source)}.param")
            state.clear()
            for kind, value in old.state(master.data, places).items():
                state[kind] = value.to(_home(trainer, master, kind))
    trainer.scheduler.num_steps = old.scalars(0)["schedule_steps"]
    trainer.state.step = old.scalars(0)["step"]


def _slot_names(trainer: MegatronTrainer) -> dict[str, str]:
    """Name the parameter of each optimiser slot; nothing for the flat shards of the distributed optimiser."""
    owners = {id(getattr(param, "main_param", None)): name for name, param in trainer.params.items()}
    owners |= {id(param): name for name, param in trainer.params.items()}
    return {key: owners[id(master)] for key, master, _ in _optimizer_slots(trainer) if id(master) in owners}


# what a rank's files hold -------------------------------------------------------------------------------------------


def _tensors(trainer: MegatronTrainer) -> Iterator[tuple[str, Tensor]]:
    for name, param in trainer.params.items():
        yield f"model.{name}", param.data
    for key, master, state in _optimizer_slots(trainer):
        if not trainer.owns(master):  # float32 weights are their own masters
            yield f"{key}.param", master.data
        for name, value in state.items():
            yield f"{key}.state.{name}", value if isinstance(value, Tensor) else torch.tensor(value)
    yield "rng.cpu", torch.random.get_rng_state()
    if trainer._platform.device.type == "cuda":
        yield "rng.cuda", torch.cuda.get_rng_state(trainer._platform.device)


def _scalars(trainer: MegatronTrainer) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if isinstance(value, int | float | bool | str)}
        for _, inner in _inner_optimizers(trainer)
        for group in inner.param_groups
    ]
    scalars = {"step": trainer.state.step, "schedule_steps": trainer.scheduler.num_steps, "groups": groups}
    return scalars | {"slots": _slot_names(trainer)}


def _inner_optimizers(trainer: MegatronTrainer) -> Iterator[tuple[int, Any]]:
    for index, part in enumerate(getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])):
        if part.optimizer is not None:
            yield index, part.optimizer


def _optimizer_slots(trainer: MegatronTrainer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    for index, inner in _inner_optimizers(trainer):
        for g, group in enumerate(inner.param_groups):
            for p, param in enumerate(group["params"]):
                yield f"optimizer.{index}.{g}.{p}", param, inner.state[param]


def _restore(trainer: MegatronTrainer, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    device = trainer._platform.device
    with torch.no_grad():
        for name, param in trainer.params.items():
            param.data.copy_(tensors[f"model.{name}"])
        for key, master, state in _optimizer_slots(trainer):
            if not trainer.owns(master):
                master.data.copy_(tensors[f"{key}.param"])
            state.clear()
            prefix = f"{key}.state."
            for name in [name for name in tensors if name.startswith(prefix)]:
                kind = name.removeprefix(prefix)
                state[kind] = tensors[name].clone().to(_home(trainer, master, kind))
    groups = iter(scalars["groups"])
    for _, inner in _inner_optimizers(trainer):
        for group in inner.param_groups:
            group.update(next(groups))
    trainer.scheduler.num_steps = scalars["schedule_steps"]
    trainer.state.step = scalars["step"]
    torch.random.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _home(trainer: MegatronTrainer, master: Tensor, kind: str) -> torch.device:
    """Return where a piece of optimiser state lives: step counts on the CPU, but with the fused optimiser."""
    groups_now = [group for _, inner in _inner_optimizers(trainer) for group in inner.param_groups]
    fused = master.is_cuda and any(group.get("fused") for group in groups_now)
    return trainer._platform.device if kind != "step" or fused else torch.device("cpu")


def _identity(trainer: MegatronTrainer) -> dict[str, Any]:
    config = trainer.config
    return {
        "architecture": trainer.shape.architecture,
        "dtype": config.dtype,
        "world_size": trainer.topology.world_size,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "context_parallel": config.context_parallel,
        "expert_parallel": config.expert_parallel,
        "distributed_optimizer": config.optimizer.distributed,
    }


# files --------------------------------------------------------------------------------------------------------------


def _rank_name(rank: int) -> str:
    return f"rank_{rank:05d}"


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _find(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder to read and its manifest; falls back to one that a dying save had moved aside."""
    for candidate in (folder, _aside(folder)):
        path = candidate / MANIFEST
        if not path.is_file():
            continue
        try:
            manifest = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError("the manifest is not JSON", where=str(path), seen=str(error)) from error
        if manifest.get("format") != FORMAT:
            seen, expected = f"format {manifest.get('format')!r}", f"format {FORMAT}"
            raise CheckpointError("unknown checkpoint format", where=str(path), seen=seen, expected=expected)
        return candidate, manifest
    raise CheckpointError(
        "no valid checkpoint",
        where=str(folder),
        seen="no such folder" if not folder.exists() else f"no {MANIFEST} in it",
        fix="give the folder that save() published; nothing was loaded",
    )


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _fresh(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _swap_in(temporary: Path, folder: Path) -> None:
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _together(topology: Topology, folder: Path, action: Callable[[], None]) -> None:
    """Run an action on every rank and fail on all of them when it fails on one."""
    problem = ""
    cause: Exception | None = None
    try:
        action()
    except (OSError, SafetensorError) as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(topology.gather(problem)) if text]
    if problems:
        raise CheckpointError(
            "nothing was published, what was there stays valid",
            where=str(folder),
            seen="; ".join(problems),
            fix="free space on that file system, or check its permissions",
        ) from cause
