"""Learn where a model's own weight loaders put each checkpoint slice, by running them once on nothing.

The loaders are handed *meta* tensors: shape, dtype and strides, no memory. Every slicing a loader does (narrow, chunk,
index, reshape, transpose) yields a view of the same meta storage, and the view's offset, shape and strides say exactly
which elements of the checkpoint tensor it is: torch computes the geometry, nothing is re-implemented. When the loader
finally copies into a live parameter, a dispatch mode sees the copy, writes down (source view, destination view) and
does not execute it, so a dry run changes no weight.

What is not a copy of a slice is written down too, so that it can be refused or sent another way: a fill with a constant
(vocabulary padding), a computed value (a cast, arithmetic, a sum of two tensors), a write that is no copy at all.

No table of architectures is involved: whatever `load_weights` does is what is learnt, for any tensor, pipeline or
expert parallel layout, since each worker records its own loaders.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vime_sync.errors import PlanError, ShapeMismatchError, UnknownNameError
from vime_sync.layout import CheckpointTensor, Shape

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class View:
    """A strided view: element offset, shape and strides within its base."""

    offset: int
    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, tensor: torch.Tensor, *, offset: int | None = None) -> View:
        """The geometry of a tensor; its own storage offset unless another is given."""
        at = int(tensor.storage_offset()) if offset is None else offset
        return cls(at, tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Write:
    """A recorded copy of a slice of a checkpoint tensor into a live tensor."""

    source: str
    source_view: View
    live: str
    live_view: View


@dataclass(frozen=True, slots=True)
class Fill:
    """A recorded write of a constant into a live tensor (padding)."""

    live: str
    live_view: View
    value: float


@dataclass(frozen=True, slots=True)
class Computed:
    """A recorded write that is not a copy of a slice: which live tensor, and why."""

    live: str
    reason: str


@dataclass
class Recording:
    """What one dry run of a model's loaders did.

    Attributes:
        writes: Copies of slices, in the order of the loaders.
        fills: Constants.
        computed: Live tensors that cannot be reached by copying.
        used: Checkpoint names of which at least one element was written here.
    """

    writes: list[Write] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


class LiveIndex:
    """Finds which live tensor a memory address belongs to (live tensors may share one storage, as aliased ones do).

    A model may be built without memory (on the meta device); such a tensor is found by its storage, which is its own.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        """Index tensors by their address range; of tied names the first is kept."""
        self.names: dict[int, str] = {}
        self._ranges: list[tuple[int, int, str, int]] = []
        self._bare: dict[int, tuple[str, int]] = {}
        for name, tensor in live.items():
            if tensor.is_meta:
                self._bare.setdefault(_key(tensor), (name, int(tensor.storage_offset())))
            if tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() in self.names:
                continue
            self.names[tensor.data_ptr()] = name
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin, size = tensor.data_ptr(), tensor.element_size()
            self._ranges.append((begin, begin + span * size, name, size))
        self._ranges.sort()
        self._begins = [begin for begin, *_ in self._ranges]

    def find(self, tensor: torch.Tensor) -> tuple[str, View] | None:
        """The live tensor that `tensor` is a view of, and the view relative to its first element."""
        if tensor.is_meta:
            bare = self._bare.get(_key(tensor))
            return None if bare is None else (bare[0], View.of(tensor, offset=int(tensor.storage_offset()) - bare[1]))
        at = bisect_right(self._begins, tensor.data_ptr()) - 1
        if at < 0 or tensor.data_ptr() >= self._ranges[at][1]:
            return None
        begin, _, name, size = self._ranges[at]
        return name, View.of(tensor, offset=(tensor.data_ptr() - begin) // size)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records loaders instead of running them; see the module's text."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        """Watch the given live tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._live = LiveIndex(live)
        self._origin: dict[int, str] = {}
        self._derived: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []

    def source(self, tensor: CheckpointTensor) -> torch.Tensor:
        """A stand-in for a checkpoint tensor: meta, contiguous, remembered."""
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._alive.append(stand_in)
        self._origin[_key(stand_in)] = tensor.name
        return stand_in

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept copies into live memory; let views and everything harmless run."""
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func._schema.is_mutable and target is not None and (not target.is_meta or self._live.find(target)):
            return self._mutation(func, target, args, kwargs)
        if func is aten._to_copy.default and target is not None and self._is_move(target, kwargs):
            return target.view(target.shape)  # a change of device only: the slice stays the slice
        out = func(*args, **kwargs)
        self._follow(func, (*args, *kwargs.values()), out)
        return out

    def _is_move(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        same = kwargs.get("dtype") in (None, tensor.dtype) and kwargs.get("memory_format") in (
            None,
            torch.preserve_format,
            torch.contiguous_format,
        )
        return same and tensor.is_meta and _key(tensor) in self._origin

    def _mutation(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._live.find(target) if target.numel() else None
        if found is None:
            inputs = [a for a in args[1:] if isinstance(a, torch.Tensor) and a.is_meta]
            return target if inputs or not target.numel() else func(*args, **kwargs)
        live, view = found
        if func is aten.copy_.default:
            self._copy(live, view, args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self.recording.fills.append(Fill(live, view, float(args[1]) if len(args) > 1 else 0.0))
        else:
            self.recording.computed.append(Computed(live, f"the loader writes it with {func}"))
        return target

    def _copy(self, live: str, view: View, source: torch.Tensor) -> None:
        name = self._origin.get(_key(source)) if source.is_meta else None
        if name is None:
            reason = self._derived.get(_key(source), "a value that comes from no checkpoint tensor")
            self.recording.computed.append(Computed(live, f"the loader copies {reason}"))
            return
        self.recording.used.add(name)
        source_view = View.of(source)
        if source_view.shape != view.shape:
            if tuple(n for n in source_view.shape if n != 1) != tuple(n for n in view.shape if n != 1):
                self.recording.computed.append(Computed(live, f"the loader broadcasts {name}"))
                return
            source_view = View.of(source.expand(view.shape) if source.dim() < len(view.shape) else source)
        self.recording.writes.append(Write(name, source_view, live, view))

    def _follow(self, func: Any, inputs: Iterable[Any], out: Any) -> None:
        """Remember that new meta storage was computed from a checkpoint tensor, so that a copy of it can be named."""
        origins = [
            self._origin.get(_key(x)) or self._derived.get(_key(x))
            for x in inputs
            if isinstance(x, torch.Tensor) and x.is_meta
        ]
        names = [name for name in origins if name]
        if not names:
            return
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(result, torch.Tensor) and result.is_meta and _key(result) not in self._origin:
                self._alive.append(result)
                self._derived.setdefault(_key(result), f"{func} of {names[0]}")


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def record_loaders(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    live: Mapping[str, torch.Tensor],
    tensors: Iterable[CheckpointTensor],
) -> Recording:
    """Run a model's loaders on stand-ins and write down what they would do.

    Args:
        load_weights: The model's own ``load_weights``: takes an iterable of (name, tensor).
        live: The model's live parameters and buffers by name.
        tensors: The checkpoint tensors that a trainer publishes.

    Returns:
        What each tensor would be copied to.

    Raises:
        UnknownNameError: If the loaders do not know a name.
        ShapeMismatchError: If a loader refuses a shape.
        PlanError: If a loader fails for another reason (it reads values, say).
    """
    recorder = Recorder(live)
    current = ""

    def stream() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal current
        for tensor in tensors:
            current = tensor.name
            yield tensor.name, recorder.source(tensor)

    try:
        with torch.no_grad(), recorder:
            load_weights(stream())
    except (AssertionError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError, IndexError) as e:
        raise _refusal(current, e) from e
    return recorder.recording


def _refusal(name: str, cause: Exception) -> PlanError:
    text = f"{type(cause).__name__}: {cause}"
    where = f"tensor {name}"
    lowered = text.lower()
    if isinstance(cause, KeyError) or "no module or parameter named" in lowered:
        return UnknownNameError(
            "the model's loaders do not know this name",
            where=where,
            seen=text,
            expected="a name of the model's HF checkpoint",
        )
    if isinstance(cause, (AssertionError, IndexError)) or "size" in lowered or "shape" in lowered:
        return ShapeMismatchError("a loader refuses the tensor's shape", where=where, seen=text)
    return PlanError("a loader cannot be recorded", where=where, seen=text)
