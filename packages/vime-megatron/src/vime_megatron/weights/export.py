"""A trained model as a Hugging Face folder: what :meth:`MegatronTrainer.export_hf` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vime_megatron.checkpoint.folders import WRITE_ERRORS, check_target, publish
from vime_megatron.families.mapping import placements
from vime_megatron.weights.writer import copy_companions, gather_tensors, write_tensors

if TYPE_CHECKING:
    from vime_megatron.trainer import MegatronTrainer


def export_folder(
    trainer: MegatronTrainer, folder: Path, *, max_file_bytes: int, progress: Callable[[int, int], None] | None
) -> None:
    """Write the folder; every rank must call."""
    topology = trainer.topology
    check_target(topology.peers, folder, "config.json")
    placed = [placements(trainer._family.rules, trainer.shape, layout) for layout in topology.layouts]
    sizes = {place.name: prod(place.shape) for mine in placed for place in mine}
    total = sum(sizes.values()) * next(iter(trainer.params.values())).element_size()
    tensors = gather_tensors(trainer.params, placed, rank=topology.rank, device=trainer._platform.device)

    def write(temporary: Path) -> None:
        if topology.rank == 0:
            try:
                write_tensors(temporary, _counted(tensors, total, progress), max_file_bytes=max_file_bytes)
            except WRITE_ERRORS:
                for _nothing in tensors:  # other ranks are sending, and could not be told before they are done
                    pass
                raise
            copy_companions(trainer.config.model, temporary, trainer.config.dtype)
        else:
            for _nothing in tensors:
                pass

    publish(topology.peers, folder, write)


def _counted(
    tensors: Iterator[tuple[str, Tensor]], total: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
