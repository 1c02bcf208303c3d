"""Reading a checkpoint in another layout than the one that wrote it.

A checkpoint's manifest holds the layout of each rank, and the family's mapping says from a layout which box of which
checkpoint tensor lies where in that rank's parameters. So both sides speak of the same boxes: each box that this rank
needs is filled from every box of the old ranks that it meets. Float32 masters and moments have the shapes of their
parameters and follow the same boxes; step counts are taken as they are.

Not carried over: random states (the ranks are others), and the shards of the distributed optimiser, which are ranges of
flat buffers and no boxes.

Invariant (tested): training that is saved, read in another layout and continued gives the numbers of one rank that was
never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from vime_megatron.errors import CheckpointError
from vime_megatron.families.mapping import Box, Layout, Placement, placements

if TYPE_CHECKING:
    from vime_megatron.families.mapping import Rule
    from vime_megatron.families.shape import ModelShape

LAYOUT_KEYS = frozenset({"world_size", "tensor_parallel", "pipeline_parallel", "expert_parallel"})


class OldRanks:
    """The files of the ranks that wrote a checkpoint; only what is asked for is read.

    Args:
        folder: The checkpoint.
        layouts: What each rank held, from the manifest.
        rules: The family's mapping.
        shape: The model.
        rank_name: File stem of a rank.

    Raises:
        CheckpointError: The checkpoint is of a version that did not record layouts.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Sequence[Mapping[str, Any]] | None,
        rules: Sequence[Rule],
        shape: ModelShape,
        rank_name: Callable[[int], str],
    ) -> None:
        """Index the boxes of every rank."""
        if not layouts:
            raise CheckpointError(
                "the checkpoint does not say which rank held what",
                where=str(folder),
                fix="load it in the layout that wrote it, export_hf, and go on from there",
            )
        self.boxes: dict[str, dict[Box, tuple[int, Placement]]] = {}
        for rank, layout in enumerate(layouts):
            for place in placements(rules, shape, Layout(**layout)):
                self.boxes.setdefault(place.name, {}).setdefault(place.box, (rank, place))
        self._folder, self._rank_name = folder, rank_name
        self._files: dict[int, Any] = {}
        self._scalars: dict[int, dict[str, Any]] = {}

    def scalars(self, rank: int) -> dict[str, Any]:
        """Return a rank's JSON file."""
        if rank not in self._scalars:
            self._scalars[rank] = json.loads((self._folder / f"{self._rank_name(rank)}.json").read_text())
        return self._scalars[rank]

    def slot(self, rank: int, param: str) -> str:
        """Return the prefix of a parameter's optimiser tensors in a rank's file."""
        return next(key for key, name in self.scalars(rank)["slots"].items() if name == param)

    def file(self, rank: int) -> Any:
        """Return a rank's open safetensors file."""
        if rank not in self._files:
            path = self._folder / f"{self._rank_name(rank)}.safetensors"
            self._files[rank] = safe_open(path, framework="pt")
        return self._files[rank]

    def fill(self, target: Tensor, mine: Iterable[Placement], key_of: Callable[[int, str], str]) -> None:
        """Fill a tensor with a parameter's shape from all old boxes that meet its own.

        Args:
            target: Written in place; rows that only pad the vocabulary are left.
            mine: The placements of the parameter on this rank.
            key_of: The tensor to read, by old rank and old parameter name.
        """
        for place in mine:
            for rank, old in self.boxes[place.name].values():
                common = _intersect(place.box, old.box)
                if common is not None:
                    part = self.file(rank).get_slice(key_of(rank, old.param))[_within(common, old)]
                    target[_within(common, place)] = part.to(target.device, target.dtype)

    def state(self, like: Tensor, mine: Sequence[Placement]) -> dict[str, Tensor]:
        """Assemble a parameter's optimiser state.

        Args:
            like: The master that it belongs to.
            mine: The placements of the parameter on this rank.

        Returns:
            State by name; empty where no update was made yet. Tensors without axes are on the CPU.
        """
        rank, old = next(iter(self.boxes[mine[0].name].values()))
        prefix = self.slot(rank, old.param) + ".state."
        found: dict[str, Tensor] = {}
        for key in (key for key in self.file(rank).keys() if key.startswith(prefix)):  # noqa: SIM118  # no mapping
            name = key.removeprefix(prefix)
            first = self.file(rank).get_slice(key)
            if not first.get_shape():
                found[name] = self.file(rank).get_tensor(key)
                continue
            found[name] = torch.zeros_like(like)
            self.fill(found[name], mine, partial(self._state_key, name))
        return found

    def _state_key(self, name: str, rank: int, param: str) -> str:
        return f"{self.slot(rank, param)}.state.{name}"


def _intersect(a: Box, b: Box) -> Box | None:
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _within(common: Box, place: Placement) -> tuple[slice, ...]:
    """Translate a box of a checkpoint tensor to where a placement has it in its parameter."""
    return tuple(
        slice(local + start - origin, local + stop - origin)
        for (start, stop), (origin, _), (local, _) in zip(common, place.box, place.local, strict=True)
    )
