"""The load format ``vime``: loads like ``auto`` or ``dummy``, and observes post-processing.

A planned copy writes what the weight loaders would have written. That is only right for parameters which vLLM leaves as
loaded; kernels may want theirs shuffled, padded, packed or quantised, and vLLM changes them in a step after loading.
No list of layers says which: the loader fingerprints every parameter (address, geometry, content) before that step and
after it. An unchanged fingerprint proves that the step was the identity on this parameter, on this device, with these
kernels; everything else is an obstacle that the plan must respect.

An aliased model is built without memory for its parameters (`vime_sync.vllm_plugin.unallocated`).

On a CPU, vLLM packs linear weights into opaque kernel handles. The loader has it leave them plain
(`vime_sync.vllm_plugin.plain`), so that CPU engines run the same planned path as GPU ones.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from vime_sync.aliasing import AliasMap, bind
from vime_sync.digest import digest_box
from vime_sync.errors import AliasError, SyncError
from vime_sync.layout import whole
from vime_sync.vllm_plugin.plain import drop_packed_heads, keep_plain
from vime_sync.vllm_plugin.unallocated import allocate, device_of, rebinder, require_parameters_only, unallocated

#: Where the loader leaves its findings on the model.
ATTRIBUTE = "vime_sync_obstacles"
#: Where the loader leaves the binding of aliased weights on the model.
ALIAS = "vime_sync_alias"
#: Where the loader leaves the reason why weights that might have been aliased are not.
REFUSED = "vime_sync_alias_refused"
_INNER = {"checkpoint": ("auto", DefaultModelLoader), "dummy": ("dummy", DummyModelLoader)}
_ALIASED = ("alias", "auto")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fingerprint:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    content: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Fingerprint:
        data = tensor.data
        shape = tuple(data.shape)
        content = digest_box(data, whole(shape), shape, name).tolist() if data.device.type != "meta" else []
        return cls(data.data_ptr(), shape, tuple(data.stride()), data.dtype, tuple(content))


class _Unloaded:
    """A model whose parameters were created and not loaded: nothing is known to stand in the way yet."""

    rank, world_size = 0, 1

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model: Any = model
        self.device = device

    def live(self) -> dict[str, torch.Tensor]:
        return {
            **{n: p.data for n, p in self._model.named_parameters(remove_duplicate=False)},
            **{n: b for n, b in self._model.named_buffers(remove_duplicate=False) if b is not None},
        }

    def held(self, name: str) -> Mapping[str, torch.Tensor | None]:
        raise NotImplementedError

    def required(self) -> set[str]:
        return {n for n, _ in self._model.named_parameters(remove_duplicate=False)}

    def obstacles(self) -> dict[str, str]:
        return {}

    def asleep(self) -> str:
        return ""

    def alias(self) -> None:
        return None

    def alias_refused(self) -> str:
        return ""

    def reload(self, names: Iterable[str], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return self._model.load_weights(weights)


class VimeModelLoader(BaseModelLoader):
    """See the module's text. ``--model-loader-extra-config '{"weights": "dummy"}'`` skips reading a checkpoint."""

    def __init__(self, load_config: LoadConfig) -> None:
        """Choose the inner loader."""
        super().__init__(load_config)
        extra: Any = load_config.model_loader_extra_config or {}
        kind = extra.get("weights", "checkpoint") if isinstance(extra, dict) else None
        aliased = kind in _ALIASED and isinstance(extra.get("manifest"), str)
        known = {"weights", "manifest", "allocate"} if aliased else {"weights"}
        if not (aliased or kind in _INNER) or set(extra) - known:
            raise SyncError(
                "unknown options of the load format vime",
                seen=repr(extra),
                expected='{"weights": "checkpoint" | "dummy"} or {"weights": "alias" | "auto", "manifest": PATH, '
                '"allocate": true | false}',
            )
        self._frugal = aliased and not extra.get("allocate", False)
        self._kind, self._manifest = str(kind), Path(extra["manifest"]) if aliased else Path()
        load_format, loader = _INNER["dummy" if aliased else self._kind]
        inner = copy.copy(load_config)
        inner.load_format = load_format
        inner.model_loader_extra_config = {}
        self._inner = loader(inner)
        self._built_on = torch.device("cpu")
        self._before: dict[str, _Fingerprint] = {}
        self._attributes: dict[str, set[str]] = {}

    def download_model(self, model_config: Any) -> None:
        """Fetch the checkpoint, if one is read."""
        self._inner.download_model(model_config)

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Build the model; one that will be aliased without memory for its parameters (vLLM 0.30 and newer ask here).

        Raises:
            AliasError: If more than its parameters would be without memory.
        """
        if not self._frugal:
            built: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
            return built
        self._built_on = torch.empty(0).device
        with unallocated(self._built_on):
            model: torch.nn.Module = super().create_model(vllm_config, model_config, prefix)
        require_parameters_only(model)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load as the inner loader does (or alias), then take fingerprints."""
        if self._kind not in _ALIASED or not self._alias(model):
            allocate(model, device_of(model, self._built_on))
            self._inner.load_weights(model, model_config)
        if current_platform.is_cpu():
            keep_plain(model)
        self._before = {name: _Fingerprint.of(name, p) for name, p in model.named_parameters()}
        self._attributes = {name: _loose_tensors(module) for name, module in model.named_modules()}

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Load, post-process, and leave the obstacles on the model as ``vime_sync_obstacles``."""
        model: torch.nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if current_platform.is_cpu():
            drop_packed_heads(model)
        obstacles = self._obstacles(model)
        if getattr(model, ALIAS, None) is not None and obstacles:
            AliasMap({}, obstacles).require()
        setattr(model, ATTRIBUTE, obstacles)
        return model

    def _alias(self, model: torch.nn.Module) -> bool:
        """Make the parameters views of the trainer's memory; whether that was done.

        Raises:
            AliasError: If it cannot be done and nothing else was allowed.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        rebind = rebinder(model)

        def assign(name: str, view: torch.Tensor) -> None:
            rebind(parameters[name], view)

        try:
            unloaded = _Unloaded(model, device_of(model, self._built_on))
            binding = bind(unloaded, json.loads(self._manifest.read_text()), assign)
        except AliasError as error:
            if self._kind == "alias":
                raise
            logger.warning("vime-sync: the weights are not aliased", exc_info=True)
            setattr(model, REFUSED, str(error))
            return False
        setattr(model, ALIAS, binding)
        return True

    def _obstacles(self, model: torch.nn.Module) -> dict[str, str]:
        after = {name: _Fingerprint.of(name, p) for name, p in model.named_parameters()}
        found = {}
        for name, was in self._before.items():
            now = after.get(name)
            if now is None:
                found[name] = "post-processing removed it"
            elif now != was:
                what = "moved" if now.content == was.content and now.shape == was.shape else "changed"
                found[name] = f"post-processing {what} it: {was.shape} {was.dtype} to {now.shape} {now.dtype}"
        found |= {name: "post-processing created it" for name in after.keys() - self._before.keys()}
        for name, module in model.named_modules():
            derived = _loose_tensors(module) - self._attributes.get(name, set())
            packed = getattr(module, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear
            if derived or packed:
                why = (
                    f"post-processing derives {sorted(derived)} from it"
                    if derived
                    else "a kernel handle holds it packed"
                )
                prefix = f"{name}." if name else ""
                found |= {n: why for n in after if n.startswith(prefix) and n not in found}
        return found


def _loose_tensors(module: torch.nn.Module) -> set[str]:
    """Names of tensors that a module holds outside its parameters and buffers."""
    return {key for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
