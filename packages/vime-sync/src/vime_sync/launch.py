"""What a vLLM server must be started with to be synced."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

PLUGIN = "vime_sync"


def engine_arguments(
    *,
    weights: Literal["checkpoint", "dummy", "alias", "auto"] = "checkpoint",
    manifest: Path | str = "",
    allocate: bool = False,
) -> list[str]:
    """Command-line arguments for ``vllm serve`` (or ``python -m vllm.entrypoints.openai.api_server``).

    Args:
        weights: ``"checkpoint"`` reads the model folder; ``"dummy"`` starts with random weights, for a trainer that
            sends its own before the first request. ``"alias"`` runs on the trainer's memory (`vime_sync.aliasing`) or
            does not start; ``"auto"`` does so where the layout allows it, and starts like ``"dummy"`` where not.
        manifest: For the last two: the file that holds the trainer's merged manifest as JSON.
        allocate: For the last two: build the model with memory for its parameters, which is given back when they are
            aliased. Only for a model that `vime_sync.vllm_plugin.unallocated` refuses.

    Returns:
        The arguments.
    """
    arguments = [
        "--load-format",
        "vime",
        "--weight-transfer-config",
        json.dumps({"backend": "vime"}),
        "--worker-extension-cls",
        "vime_sync.vllm_plugin.worker.SyncWorker",
    ]
    if weights != "checkpoint":
        options: dict[str, str | bool] = {"weights": weights}
        options |= {"manifest": str(Path(manifest).resolve())} if manifest else {}
        options |= {"allocate": True} if allocate else {}
        arguments += ["--model-loader-extra-config", json.dumps(options)]
    return arguments


def engine_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that the server needs beside its arguments.

    vLLM loads plugins that add HTTP routes only if ``VLLM_PLUGINS`` names them. The variable is an allow-list for all
    plugins, so one that is set already is extended.

    Args:
        base: The environment that the server will otherwise get; this process's by default.

    Returns:
        Only the variables to set.
    """
    allowed = [name for name in (os.environ if base is None else base).get("VLLM_PLUGINS", "").split(",") if name]
    return {"VLLM_PLUGINS": ",".join(dict.fromkeys([*allowed, PLUGIN]))}
