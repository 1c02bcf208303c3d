"""The weight-transfer backend ``vime``: a `Receiver` over the worker's model, behind vLLM's own four-phase interface.

`SyncSession` reaches the receiver through the ``/vime`` routes and gets reports back. The four phases of vLLM's RL
routes work too, for frameworks that already speak them: ``init`` takes ``{"message": {...connect...}}``, ``update``
takes ``{"message": {...stage...}}`` and ``finish`` commits. A refusal is raised there, because those routes carry no
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime_sync.aliasing import AliasBinding
from vime_sync.errors import EmptyUpdateError, from_wire
from vime_sync.receiver import Receiver
from vime_sync.vllm_plugin.loader import ALIAS, ATTRIBUTE, REFUSED


class VllmModel:
    """What the receiver needs of a vLLM worker's model."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        """Wrap a loaded model."""
        self._model: Any = model
        self._config = vllm_config
        self.device = torch.device(device)
        self.rank = int(vllm_config.parallel_config.rank)
        self.world_size = int(vllm_config.parallel_config.world_size)
        #: The tree of modules does not change after loading, and finding them again costs milliseconds.
        self._modules = [
            (f"{name}." if name else "", module) for name, module in model.named_modules(remove_duplicate=False)
        ]

    def live(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the modules hold them now, tied ones under each name."""
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._modules:
            found |= {prefix + key: p.data for key, p in module._parameters.items() if p is not None}
            found |= {prefix + key: b for key, b in module._buffers.items() if b is not None}
        return found

    def held(self, name: str) -> Mapping[str, torch.Tensor | None]:
        """The parameters or buffers of the module that has it."""
        path, _, key = name.rpartition(".")
        module: Any = self._model.get_submodule(path)
        found: Mapping[str, torch.Tensor | None] = module._parameters if key in module._parameters else module._buffers
        return found

    def required(self) -> set[str]:
        """The parameters."""
        return {n for n, _ in self._model.named_parameters(remove_duplicate=False)}

    def obstacles(self) -> Mapping[str, str]:
        """What the load format ``vime`` found; without it nothing is known, so everything is an obstacle."""
        found = getattr(self._model, ATTRIBUTE, None)
        if found is None:
            reason = "the engine was not started with --load-format vime, so post-processing was not observed"
            return dict.fromkeys(self.required(), reason)
        return dict(found)

    def asleep(self) -> str:
        """What vLLM's sleep-mode allocator says of the weights; an engine without sleep mode has none."""
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.instance
        entries = allocator.pointer_to_data.values() if allocator is not None else ()
        away = sum(1 for entry in entries if entry.is_asleep and entry.tag == "weights")
        return f"{away} allocations of weights are offloaded" if away else ""

    def alias(self) -> AliasBinding | None:
        """What the load format ``vime`` bound, if it did."""
        return getattr(self._model, ALIAS, None)

    def alias_refused(self) -> str:
        """Why the load format ``vime`` did not bind, if it tried."""
        return str(getattr(self._model, REFUSED, ""))

    def reload(self, names: Iterable[str], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """VLLM's layerwise reload of the modules that own the named tensors; storage stays where it is."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        layers = [self._model.get_submodule(path) for path in sorted({name.rpartition(".")[0] for name in names})]
        with torch.device(self.device):
            for layer in layers:
                if self.device.type == "cpu":
                    _repack_experts(layer)
                initialize_layerwise_reload(layer)
            self.load_weights(weights)
            with set_current_vllm_config(self._config):
                for layer in layers:
                    finalize_layerwise_reload(layer, self._config.model_config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The model's own loaders, under the configuration they expect."""
        with set_current_vllm_config(self._config):
            return self._model.load_weights(weights)


def _repack_experts(layer: Any) -> None:
    """Make vLLM pack a CPU's experts again.

    It does so only while it has no kernel for them, and keeps the kernel over a reload; the experts would then be read
    as packed and not be. On a CPU no graph has captured the kernel, so it may be built anew.
    """
    method = getattr(layer, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None  # type: ignore[union-attr]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The connect message."""

    message: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The stage message."""

    message: dict[str, Any] = field(default_factory=dict)


class VimeWeightTransferEngine(WeightTransferEngine):
    """See the module's text."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Serve the worker's model."""
        super().__init__(config, vllm_config, device, model)
        self.receiver = Receiver(VllmModel(model, vllm_config, device))
        self._last: dict[str, Any] = {}

    def _do(self, message: dict[str, Any]) -> None:
        reply = self.receiver.handle(message)
        if not reply["ok"]:
            raise from_wire(reply)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect.

        Raises:
            SyncError: What the receiver refused.
        """
        self._do({**init_info.message, "op": "connect"})

    def start_weight_update(self) -> None:
        """Nothing yet: an update opens when its version is staged."""
        self._last = {}

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage.

        Raises:
            SyncError: What the receiver refused; nothing was written.
        """
        self._do({**update_info.message, "op": "stage"})
        self._last = dict(update_info.message)

    def finish_weight_update(self) -> None:
        """Commit what was staged.

        Raises:
            SyncError: What the receiver refused.
        """
        if not self._last:
            raise EmptyUpdateError("finish without an update", where="finish_weight_update")
        self._do({**self._last, "op": "commit"})
        self._last = {}

    def shutdown(self) -> None:
        """Let go of the trainer."""
        self.receiver.close()
