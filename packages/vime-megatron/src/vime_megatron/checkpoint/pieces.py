"""What one rank holds of a checkpoint: boxes of named tensors, each a view of the rank's own memory.

A checkpoint speaks of the model's Hugging Face tensors and nothing else: ``model.<name>`` for a weight,
``optimizer.param.<name>`` for its float32 master, ``optimizer.exp_avg.<name>`` for a moment. The family's mapping
says which box of which tensor lies where in which parameter, masters and moments have the shapes of their parameters,
and so every layout holds boxes of the same tensors. That is all that resharding needs.

The distributed optimiser shards flat buffers and cuts a parameter anywhere. But a range of a row-major matrix is at
most three boxes (the end of a row, whole rows, the start of a row), so its shards are boxes too, and nothing has to be
gathered to save them.

Invariants (tested): the boxes of a range tile it, in order; over all ranks the pieces tile every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vime_megatron.families.mapping import Box, Placement

if TYPE_CHECKING:
    from vime_megatron.trainer import MegatronTrainer

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "rng."


@dataclass(frozen=True, eq=False)
class Piece:
    """One box of a checkpoint tensor in this rank's memory.

    Attributes:
        key: The tensor's name in the checkpoint.
        shape: Its whole shape.
        box: The part held here.
        data: A view with the box's shape; writing to it changes the trainer.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor

    @property
    def start(self) -> tuple[int, ...]:
        """Where the box starts."""
        return tuple(start for start, _ in self.box)


@dataclass(frozen=True, eq=False)
class OptimizerSlot:
    """What the optimiser keeps for one parameter, or for a range of it.

    Attributes:
        name: The parameter's name.
        shape: The parameter's shape.
        span: The range of its elements that this rank updates.
        master: The tensor that is updated; float32 weights are their own.
        state: The optimiser's state of it: moments of the master's shape, and a step count.
    """

    name: str
    shape: tuple[int, ...]
    span: tuple[int, int]
    master: Tensor
    state: dict[str, Any]


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Cut a range of a row-major vector or matrix into boxes.

    Args:
        shape: The tensor's shape, one or two axes.
        start: First element.
        stop: One past the last.

    Returns:
        The boxes with the position of their first element in the range; each box is contiguous. At most three.
    """
    if len(shape) == 1:
        return [(((start, stop),), 0)] if start < stop else []
    width = shape[1]
    boxes: list[tuple[Box, int]] = []
    at = start
    while at < stop:
        row, column = divmod(at, width)
        rows = (stop - at) // width if column == 0 else 0
        columns = (0, width) if rows else (column, min(width, column + stop - at))
        boxes.append((((row, row + max(rows, 1)), columns), at - start))
        at += rows * width or columns[1] - columns[0]
    return boxes


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes share, or ``None``."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def tensor_pieces(
    prefix: str, tensor: Tensor, shape: Sequence[int], span: tuple[int, int], places: Sequence[Placement]
) -> Iterator[Piece]:
    """Cut a tensor that belongs to a range of a parameter into boxes of checkpoint tensors.

    Args:
        prefix: Put before the checkpoint names.
        tensor: As many elements as the range, contiguous.
        shape: The parameter's shape.
        span: The range.
        places: The parameter's placements.

    Yields:
        Views of the tensor.
    """
    flat = tensor.detach().view(-1)
    for box, offset in range_boxes(shape, *span):
        sizes = [stop - start for start, stop in box]
        count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        view = flat[offset : offset + count].view(sizes)
        for place in places:
            common = intersect(box, place.local)
            if common is not None:
                moved = tuple(
                    (start - here + there, stop - here + there)
                    for (start, stop), (here, _), (there, _) in zip(common, place.local, place.box, strict=True)
                )
                yield Piece(prefix + place.name, place.shape, moved, view[_slices(common, box)])


class Inventory:
    """The pieces of one trainer.

    Args:
        trainer: Whose.
        copies: Whether a tied embedding counts on the last stage too, which repeats the first one's. A reader fills it;
            a writer leaves it out, because the distributed optimiser cuts the two differently.
    """

    def __init__(self, trainer: MegatronTrainer, *, copies: bool) -> None:
        """Sort the placements by parameter."""
        self._trainer = trainer
        self._places: dict[str, list[Placement]] = {name: [] for name in trainer.params}
        for place in trainer._placed:
            if copies or not (trainer.shape.tied and place.param == "output_layer.weight"):
                self._places[place.param].append(place)
        self.slots = list(_slots(trainer))

    def model(self) -> Iterator[Piece]:
        """Return the weights."""
        for name, param in self._trainer.params.items():
            yield from tensor_pieces(MODEL, param.data, param.shape, (0, param.numel()), self._places[name])

    def optimizer(self) -> Iterator[Piece]:
        """Return masters and moments, as far as they exist."""
        for slot in self.slots:
            places = self._places[slot.name]
            if not self._trainer.owns(slot.master):  # float32 weights are their own masters
                yield from tensor_pieces(f"{OPTIMIZER}param.", slot.master, slot.shape, slot.span, places)
            for kind in moments_of(slot):
                tensor = slot.state[kind]
                yield from tensor_pieces(f"{OPTIMIZER}{kind}.", tensor, slot.shape, slot.span, places)

    def random(self) -> Iterator[Piece]:
        """Return this rank's random states; reading them does not restore them."""
        trainer = self._trainer
        states = {"cpu": torch.random.get_rng_state()}
        if trainer._platform.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(trainer._platform.device)
        for name, state in states.items():
            key = f"{RANDOM}{name}.{trainer.topology.rank}"
            yield Piece(key, tuple(state.shape), ((0, state.numel()),), state)


def moments_of(slot: OptimizerSlot) -> list[str]:
    """Return the names of the state tensors that have one value for each element of the master."""
    return [
        kind
        for kind, value in slot.state.items()
        if kind != "step" and isinstance(value, Tensor) and value.shape == slot.master.shape
    ]


def _slots(trainer: MegatronTrainer) -> Iterator[OptimizerSlot]:
    names = {id(param): name for name, param in trainer.params.items()}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        if part.optimizer is None:
            continue
        if trainer.config.optimizer.distributed:
            yield from _sharded_slots(part, names)
        else:
            yield from _whole_slots(part, trainer, names)


def _whole_slots(part: Any, trainer: MegatronTrainer, names: dict[int, str]) -> Iterator[OptimizerSlot]:
    masters = {id(getattr(param, "main_param", None)): name for name, param in trainer.params.items()} | names
    for group in part.optimizer.param_groups:
        for master in group["params"]:
            state = part.optimizer.state[master]
            yield OptimizerSlot(masters[id(master)], tuple(master.shape), (0, master.numel()), master, state)


def _sharded_slots(part: Any, names: dict[int, str]) -> Iterator[OptimizerSlot]:
    """Ask Megatron's distributed optimiser which range of which parameter each of its shards is."""
    for param in part.model_param_gbuf_map:
        span = part._get_model_param_range_map(param)["param"]
        group, order = part.model_param_group_index_map[param]
        master = part.optimizer.param_groups[group]["params"][order]
        state = part.optimizer.state[master]
        yield OptimizerSlot(names[id(param)], tuple(param.shape), (span.start, span.end), master, state)
