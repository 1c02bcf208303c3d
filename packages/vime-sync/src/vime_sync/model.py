"""What a receiver needs of an engine's model, and how the model's plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vime_sync.errors import UnplannableError
from vime_sync.layout import CheckpointTensor
from vime_sync.plan import LiveTensor, Plan, build_plan
from vime_sync.record import record_loaders

if TYPE_CHECKING:
    from vime_sync.aliasing import AliasBinding


class Model(Protocol):
    """What a receiver needs of an engine's model; the vLLM plugin and the test engine each have one."""

    rank: int
    world_size: int
    device: torch.device

    def live(self) -> Mapping[str, torch.Tensor]:
        """Live parameters and buffers by name; tied ones may appear under each name."""

    def held(self, name: str) -> Mapping[str, torch.Tensor | None]:
        """The model's own dictionary in which a live tensor is found under the last part of its name, or its whole."""

    def required(self) -> set[str]:
        """Names that a checkpoint must fill (the parameters)."""

    def obstacles(self) -> Mapping[str, str]:
        """Live tensors that post-processing changed after they were loaded, each with the reason."""

    def asleep(self) -> str:
        """Why the weights are not in memory now (sleep mode), or empty."""

    def alias(self) -> AliasBinding | None:
        """The trainer's memory that the weights are, if they are (`vime_sync.aliasing`)."""

    def alias_refused(self) -> str:
        """Why the weights are not the trainer's memory although they might have been, or empty."""

    def reload(self, names: Iterable[str], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load and post-process the layers of some live tensors again, in place."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The model's own loaders."""


class Anchors:
    """Where live tensors were when a plan was made; finds out whether any has moved since.

    Asked in every pause, so it walks no modules and makes no tensors: it looks into the model's own dictionaries, which
    show a parameter that was replaced as well as one whose memory was. Parameters of vLLM's own classes answer every
    question through Python unless that is switched off.
    """

    def __init__(self, model: Model, names: Iterable[str]) -> None:
        """Remember where the named live tensors are."""
        live = model.live()
        self._at: list[tuple[Mapping[str, torch.Tensor | None], str, str, int]] = []
        for name in names:
            holder = model.held(name)
            key = name if name in holder else name.rpartition(".")[2]
            self._at.append((holder, key, name, live[name].data_ptr()))

    def moved(self) -> str:
        """The name of the first that is elsewhere now, or empty."""
        with torch._C.DisableTorchFunctionSubclass():
            for holder, key, name, address in self._at:
                tensor = holder.get(key)
                if tensor is None or tensor.data_ptr() != address:
                    return name
        return ""


def plan_model(model: Model, tensors: Sequence[CheckpointTensor], *, cast: bool = False, reload: bool = False) -> Plan:
    """Learn where a model's loaders put the given tensors, and prove that they fill it.

    Args:
        model: The engine's model. Nothing of it is written.
        tensors: What a trainer publishes.
        cast: Allow a checkpoint dtype that differs from the live one.
        reload: Allow live tensors that no copy can reach; the engine's own loaders fill them at every sync.

    Returns:
        A complete plan.

    Raises:
        PlanError: By name: an unknown name, a wrong shape or dtype, a hole, or a layout that no copy can reach.
    """
    live = model.live()
    first: dict[tuple[bool, int], str] = {}
    for name, tensor in live.items():
        if tensor.numel():
            at = int(tensor.untyped_storage()._cdata) if tensor.is_meta else tensor.data_ptr()
            first.setdefault((tensor.is_meta, at), name)
    own = {name: live[name] for name in first.values()}
    recording = record_loaders(model.load_weights, own, tensors)
    required, obstacles = model.required(), model.obstacles()
    entries = {
        name: LiveTensor(tuple(t.shape), tuple(t.stride()), t.dtype, name in required, obstacles.get(name, ""))
        for name, t in own.items()
    }
    plan = build_plan(tensors, recording, entries, cast=cast)
    missing = {**plan.reload, **{n: r for n, r in obstacles.items() if n not in own}}
    if missing and not (reload and plan.reload.keys() == missing.keys()):
        name, reason = next(iter(missing.items()))
        raise UnplannableError(
            f"{len(missing)} live tensors cannot be copied into",
            where=f"{name} and others" if len(missing) > 1 else name,
            seen=reason,
            fix="serve an unquantised model with engine_arguments(), or connect with reload=True",
        )
    return plan
