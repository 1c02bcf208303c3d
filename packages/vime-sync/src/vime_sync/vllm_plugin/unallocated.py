"""Building a model whose parameters take no memory, because they will be views of the trainer's.

vLLM creates a model by running its constructors, which allocate every parameter. An aliased engine throws all of them
away at once, so for a moment it would need a whole model's memory beside the trainer's. `unallocated` lets the
constructors run with every large ``torch.empty`` on the meta device: shape and dtype, no memory. The loaders can be
recorded on those (`vime_sync.record` finds a live tensor by its storage), and `rebinder` puts real ones in their place,
keeping class and attributes, wherever a module refers to them.

Only parameters may end up without memory. A buffer, or a tensor that a module keeps beside its parameters, was meant to
hold something: `require_parameters_only` refuses such a model by name rather than serve what was never computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vime_sync.errors import AliasError

#: Smaller tensors are allocated: scales and norms, which constructors may also fill.
FROM_BYTES = 1 << 16


class _OnMeta(TorchFunctionMode):
    """Turns large ``torch.empty`` of one kind of device into meta tensors."""

    def __init__(self, device: torch.device, from_bytes: int) -> None:
        super().__init__()
        self._device, self._from_bytes = device, from_bytes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._ours(kwargs.get("device")) and self._large(args, kwargs):
            return func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        return func(*args, **kwargs)

    def _ours(self, device: Any) -> bool:
        return device is None or torch.device(device).type == self._device.type

    def _large(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        size = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return math.prod(int(n) for n in size) * int(dtype.itemsize) >= self._from_bytes


@contextmanager
def unallocated(device: torch.device, *, from_bytes: int = FROM_BYTES) -> Iterator[None]:
    """A block in which large tensors are created without memory.

    Args:
        device: Where they would have been.
        from_bytes: How large is large.
    """
    with _OnMeta(device, from_bytes):
        yield


def require_parameters_only(model: torch.nn.Module) -> None:
    """Refuse a model in which something else than a parameter has no memory.

    Args:
        model: As it was built.

    Raises:
        AliasError: Naming the first such tensor.
    """
    for prefix, module in model.named_modules():
        loose = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for key, tensor in {**module._buffers, **loose}.items():
            if tensor is not None and tensor.is_meta:
                raise AliasError(
                    "this model's constructor keeps a large tensor that is no parameter",
                    where=f"{prefix}.{key}" if prefix else key,
                    seen=f"{tuple(tensor.shape)} {tensor.dtype}, made by torch.empty",
                    expected="parameters only, which the trainer's memory replaces",
                    fix='start it with engine_arguments(weights="alias", allocate=True, ...)',
                )


def place(tensor: torch.Tensor) -> tuple[str, int]:
    """What tells a tensor from others that do not share its memory; meta tensors have a storage but no address."""
    if tensor.is_meta:
        return "meta", int(tensor.untyped_storage()._cdata)
    return tensor.device.type, tensor.data_ptr()


def rebinder(model: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that makes every parameter with the memory of one tensor a view of another.

    Args:
        model: Whose modules refer to the parameters; tied ones from several places.

    Returns:
        Takes the tensor as it is and the one to put in its place, of the same shape and dtype.
    """
    owners: dict[tuple[str, int], list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(place(parameter), []).append((module, key))

    def rebind(old: torch.Tensor, new: torch.Tensor) -> None:
        made: dict[int, torch.Tensor] = {}
        for module, key in owners[place(old)]:
            parameter: Any = module._parameters[key]
            if not parameter.is_meta:
                parameter.data = new
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _as(parameter, new)
            module._parameters[key] = made[id(parameter)]  # type: ignore[assignment]

    return rebind


def _as(parameter: Any, data: torch.Tensor) -> torch.Tensor:
    """The data with a parameter's class and attributes (its weight loader, say)."""
    made: Any = data.detach()
    made.__class__ = parameter.__class__
    made.__dict__ = parameter.__dict__.copy()
    return made


def device_of(model: torch.nn.Module, built_on: torch.device) -> torch.device:
    """Where a model is or will be, although most of its parameters may have no memory yet.

    torch's default device does not tell: vLLM builds a model with it set, and loads with it unset.

    Args:
        model: As it was built; its small parameters have memory.
        built_on: The answer for a model in which nothing has.

    Returns:
        The device.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), built_on)


def allocate(model: torch.nn.Module, device: torch.device) -> None:
    """Give every parameter without memory some, uninitialised: the model is loaded in the ordinary way after all.

    Args:
        model: A model that was built in `unallocated`.
        device: Where.
    """
    rebind = rebinder(model)
    seen: set[tuple[str, int]] = set()
    for parameter in list(model.parameters()):
        if parameter.is_meta and place(parameter) not in seen:
            seen.add(place(parameter))
            data = parameter.data
            rebind(
                parameter, torch.empty_strided(tuple(data.shape), tuple(data.stride()), dtype=data.dtype, device=device)
            )
