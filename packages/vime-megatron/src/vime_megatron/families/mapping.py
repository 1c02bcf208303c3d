"""How checkpoint tensors lie in Megatron parameters, as data.

A family declares a :class:`Rule` per parameter: its name, and the checkpoint tensors that are stacked in it along axis
0, each with its shape in named sizes and the axis that tensor parallelism splits. From these rules alone follow

* import: which box of which checkpoint tensor goes to which box of a local parameter;
* export: the same boxes, read the other way;
* weight sync: where each checkpoint tensor lies in the long-lived parameter buffers, with no gather.

The stacking is vLLM's own, rank by rank: ``[q; k; v]`` and ``[gate; up]``. An engine that has the same tensor-parallel
size can therefore use the trainer's parameters as they lie.

Invariants (tested): the boxes of a rank's placements tile each of its parameters exactly once, padding rows of the
vocabulary aside, and over all tensor-parallel ranks they cover each checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vime_megatron.errors import ModelError
from vime_megatron.families.shape import ModelShape

Box = tuple[tuple[int, int], ...]
"""Half-open ranges, one per axis."""


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a parameter.

    Attributes:
        name: Checkpoint name; ``{L}`` stands for the layer, ``{X}`` for the expert.
        shape: Sizes by name, from :attr:`ModelShape.dims`.
        split: Axis that tensor parallelism splits; ``None`` when every rank holds it whole.
    """

    name: str
    shape: tuple[str, ...]
    split: int | None = None


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        target: Parameter name; ``{L}`` stands for the layer.
        parts: What is stacked in it along axis 0, in order. Parts whose names hold ``{X}`` are repeated for each expert
            of the rank, one expert after the other.
        when: A boolean attribute of :class:`ModelShape` that must hold for the parameter to exist.
    """

    target: str
    parts: tuple[Part, ...]
    when: str | None = None

    @property
    def per_expert(self) -> bool:
        """The parts stand for those of every expert."""
        return "{X}" in self.parts[0].name

    @property
    def per_layer(self) -> bool:
        """The rule stands for one parameter in each layer."""
        return "{L}" in self.target


@dataclass(frozen=True)
class Layout:
    """What one rank holds.

    Attributes:
        rank: Global rank.
        tp_rank: Tensor-parallel rank.
        tp_size: Tensor-parallel size.
        first_layer: Global index of the first layer of this pipeline stage.
        layers: Number of layers of this stage.
        first_stage: This stage holds the embedding.
        last_stage: This stage holds the final norm and the output projection.
        dp_rank: Data-parallel rank (context parallelism included); weights are the same on all, experts aside.
        first_expert: Global number of the first expert of this rank.
        experts: Number of experts of this rank, the same in each layer; 0 in a dense model.
        whole_experts: Tensor parallelism does not split experts.
    """

    rank: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    first_layer: int = 0
    layers: int = 0
    first_stage: bool = True
    last_stage: bool = True
    dp_rank: int = 0
    first_expert: int = 0
    experts: int = 0
    whole_experts: bool = False


@dataclass(frozen=True)
class Placement:
    """One box of a checkpoint tensor and the box of a local parameter that holds it; both have the same shape.

    Attributes:
        name: Checkpoint tensor.
        shape: Its whole shape.
        box: The part of it that this rank holds.
        param: Local parameter.
        local: Where in the parameter.
        split: Tensor-parallel ranks hold different boxes, or different experts.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    param: str
    local: Box
    split: bool = False


def padded_vocab(shape: ModelShape, tp_size: int) -> int:
    """Return the rows of the embedding once each tensor-parallel rank has the same number."""
    return -(-shape.vocab // tp_size) * tp_size


def check_layout(
    shape: ModelShape,
    tp_size: int,
    pp_size: int,
    ep_size: int = 1,
    cp_size: int = 1,
    *,
    whole_experts: bool = False,
) -> None:
    """Refuse parallel sizes that do not divide the model.

    Args:
        shape: The model.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline-parallel size.
        ep_size: Expert-parallel size.
        cp_size: Context-parallel size.
        whole_experts: Tensor parallelism does not split experts.

    Raises:
        ModelError: A size does not divide, or there is nothing for it to divide; the text says which.
    """
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads}
    sizes |= {} if whole_experts else {"feed-forward width": shape.ffn}
    wrong = [f"{name} = {value}" for name, value in sizes.items() if value % tp_size]
    if wrong:
        raise ModelError("tensor parallelism does not divide the model", seen=", ".join(wrong), expected=f"x {tp_size}")
    heads, groups = shape.heads // tp_size, shape.kv_heads // tp_size
    if heads % cp_size or (groups % cp_size and cp_size % groups):
        raise ModelError(
            "context parallelism does not divide the heads",
            where="context_parallel",
            seen=f"{heads} query heads and {groups} key/value heads on each tensor-parallel rank",
            expected=f"query heads that {cp_size} divides, and key/value heads that it divides or is a multiple of",
        )
    if shape.layers % pp_size:
        seen, expected = f"{shape.layers} layers", f"a multiple of {pp_size}"
        raise ModelError("pipeline parallelism does not divide the model", seen=seen, expected=expected)
    if shape.experts and shape.experts % ep_size:
        seen, expected = f"{shape.experts} experts", f"a multiple of {ep_size}"
        raise ModelError("expert parallelism does not divide the model", seen=seen, expected=expected)
    if (ep_size > 1 or whole_experts) and not shape.experts:
        raise ModelError(
            "expert parallelism needs experts",
            where="expert_tensor_parallel" if whole_experts else "expert_parallel",
            seen=f"{1 if whole_experts else ep_size}, for {shape.architecture}, a dense model",
            expected="None" if whole_experts else "1",
            fix="use tensor_parallel, pipeline_parallel or the distributed optimiser to share a dense model",
        )


def placements(rules: Sequence[Rule], shape: ModelShape, layout: Layout) -> list[Placement]:
    """Work out what one rank holds and where.

    Args:
        rules: The family's mapping.
        shape: The model.
        layout: The rank's place.

    Returns:
        Every placement of the rank, in the order of the rules, then layers.
    """
    found: list[Placement] = []
    for rule in rules:
        if rule.when is not None and not getattr(shape, rule.when):
            continue
        if rule.per_layer:
            for local in range(layout.layers):
                found += _rule_placements(rule, shape, layout, layout.first_layer + local, local)
        elif _on_stage(rule, layout):
            found += _rule_placements(rule, shape, layout, 0, 0)
    return found


def checkpoint_names(rules: Sequence[Rule], shape: ModelShape) -> set[str]:
    """Return the name of each tensor that a checkpoint of this model holds."""
    return {
        placement.name for placement in placements(rules, shape, Layout(layers=shape.layers, experts=shape.experts))
    }


def _on_stage(rule: Rule, layout: Layout) -> bool:
    if rule.when == "tied":  # the copy of the embedding that projects, where the embedding is on another stage
        return layout.last_stage and not layout.first_stage
    return layout.first_stage if rule.target.startswith("embedding.") else layout.last_stage


def _rule_placements(
    rule: Rule, shape: ModelShape, layout: Layout, global_layer: int, local_layer: int
) -> Iterator[Placement]:
    param = rule.target.replace("{L}", str(local_layer))
    row = 0
    experts = range(layout.first_expert, layout.first_expert + layout.experts) if rule.per_expert else (0,)
    for expert, part in ((expert, part) for expert in experts for part in rule.parts):
        sizes = tuple(shape.dims[name] for name in part.shape)
        box = _share(sizes, None if rule.per_expert and layout.whole_experts else part.split, layout)
        rows = box[0][1] - box[0][0]
        local = ((row, row + rows), *((0, stop - start) for start, stop in box[1:]))
        row += rows
        name = part.name.replace("{L}", str(global_layer)).replace("{X}", str(expert))
        yield Placement(name, sizes, box, param, local, part.split is not None)


def _share(sizes: tuple[int, ...], split: int | None, layout: Layout) -> Box:
    """Return the rank's box; the last ranks get less when the size (a vocabulary) does not divide."""
    box = [(0, size) for size in sizes]
    if split is not None:
        size = sizes[split]
        each = -(-size // layout.tp_size)
        start = min(layout.tp_rank * each, size)
        box[split] = (start, min(start + each, size))
    return tuple(box)
