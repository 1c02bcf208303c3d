"""Which chip, driver, runtime, packages and commits a manifest speaks of; read, never asked of the user.

What cannot be read is the text "unknown", so that a gap is seen.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vime_devices import Platform, VimeError
from vime_devices.preflight import take_snapshot

from vime_integration.device_memory import ask_memory
from vime_integration.doctor.host import available_memory
from vime_integration.doctor.packages import ENGINES, OURS, installed, package_folder

UNKNOWN = "unknown"
THIRD_PARTIES = (
    "torch", "triton", "pytorch-triton-rocm", *ENGINES, "megatron-core", "ray", "transformers", "numpy", "flash-attn",
    "transformer-engine", "amd-aiter", "nvidia-nccl-cu13", "nvidia-nccl-cu12",
)  # fmt: skip
GIT_DEADLINE_S = 20.0
IMAGE_COMMITS = Path("/opt/vime/image/commits")  # written by tools/image/fetch_commit.sh in a build


def describe(devices: Platform) -> dict[str, Any]:
    """Describe this machine and its software.

    Args:
        devices: Whose devices.

    Returns:
        JSON values: ``host``, ``devices``, ``runtime``, ``packages`` and ``commits``.
    """
    return {
        "host": _host(),
        "devices": _devices(devices),
        "runtime": _runtime(devices),
        "packages": {name: version for name in (*OURS, *THIRD_PARTIES) if (version := installed(name))},
        "commits": {"vime": own_commit(), "vllm": _vllm_commit()} | image_commits(),
    }


def _host() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_available_gib": round(available_memory(Path("/")) / 2**30, 1),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), UNKNOWN)


def _devices(devices: Platform) -> list[dict[str, Any]]:
    if devices is Platform.CPU:
        return []
    try:
        found = ask_memory()
    except (
        RuntimeError,
        TimeoutError,
    ) as error:  # the doctor's stage says so too; the manifest is written all the same
        return [{"name": UNKNOWN, "why": str(error)}]
    return [{"name": d.name, "arch": d.arch, "memory_gib": round(d.total / 2**30, 1)} for d in found]


def _runtime(devices: Platform) -> dict[str, str]:
    """Return the driver and the runtime that torch was built for."""
    folder = package_folder("torch")
    built = _constants(folder / "version.py") if folder is not None else {}
    runtime = {f"torch_{name}": str(built.get(name) or "none") for name in ("cuda", "hip")}
    if devices is Platform.CPU:
        return runtime
    try:
        snapshot = take_snapshot("acceptance", devices)
    except VimeError as error:
        return runtime | {"driver": f"{UNKNOWN} ({error.what})"}
    release = "rocm" if devices is Platform.HIP else "driver"
    runtime[release] = snapshot.runtime_version or UNKNOWN
    return runtime | ({"driver": snapshot.kernel_driver or UNKNOWN} if devices is Platform.HIP else {})


def _constants(path: Path) -> dict[str, object]:
    """Read the literal assignments of a Python file without running it."""
    found: dict[str, object] = {}
    if not path.is_file():
        return found
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def own_commit() -> str:
    """Return the commit of the checkout that this package runs from, or of what it was installed from."""
    if head := _head(Path(__file__).resolve().parent):
        return head
    text = metadata.distribution("vime-integration").read_text("direct_url.json")
    info = json.loads(text) if text else {}
    if commit := info.get("vcs_info", {}).get("commit_id"):
        return str(commit)
    source = urlsplit(str(info.get("url", "")))  # an image installs from a checkout that it keeps
    return (_head(Path(unquote(source.path))) if source.scheme == "file" else "") or UNKNOWN


def image_commits(record: Path = IMAGE_COMMITS) -> dict[str, str]:
    """Return what an image was built from, as its build recorded it; nothing outside of such an image.

    Args:
        record: Lines of a name and a full commit.
    """
    if not record.is_file():
        return {}
    pairs = [line.split() for line in record.read_text(encoding="utf-8").splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _head(folder: Path) -> str:
    head = _git(folder, "rev-parse", "HEAD")
    changed = head and _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head} (with uncommitted changes)" if changed else head


def _vllm_commit() -> str:
    folder = package_folder("vllm")
    found = _constants(folder / "_version.py") if folder is not None else {}
    commit = found.get("__commit_id__") or found.get("commit_id")
    return str(commit).removeprefix("g") if commit else UNKNOWN


def _git(folder: Path, *arguments: str) -> str:
    """Return what git says; nothing where there is no git or no repository."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - git, and arguments of ours
            command, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
