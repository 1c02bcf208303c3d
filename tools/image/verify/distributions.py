"""Checks of what is installed: builds, versions, and that the base's own are still the base's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import metadata

from constraints import changes
from flavours import PROTECTED, installed_flavours, normalise

from verify import versions
from verify.context import VLLM_DISTRIBUTIONS, Context, constants, installed_version, module_file
from verify.report import Result, passed, skipped

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")


def check_distributions(context: Context) -> Iterator[Result]:
    """Make every check that needs no interpreter of its own.

    Args:
        context: The environment.

    Yields:
        ``torch-build``, ``base:*``, ``vllm-version``, ``vllm-window``, ``vllm-commit``, ``numpy-range``, ``product``
        and ``requirements``.
    """
    yield torch_build(context)
    yield from base_untouched(context)
    yield from vllm(context)
    yield numpy_range(context)
    yield product(context)
    yield requirements()


def torch_build(context: Context) -> Result:
    """Check that torch was built for the platform; its ``version.py`` is read, not imported."""
    label, expected = "torch-build", {"rocm": "a ROCm build (+rocm, hip set)", "cuda": "a CUDA build (cuda set)"}
    path = module_file("torch", "version.py")
    if path is None:
        return passed(label, False, "no torch", expected.get(context.platform, "torch"))
    values = constants(path)
    version, hip, cuda = str(values.get("__version__", "")), values.get("hip"), values.get("cuda")
    seen = f"torch {version}, hip {hip}, cuda {cuda}"
    if context.platform == "cpu":
        # Any build runs on a CPU; the CUDA build of the public index is the usual one.
        return passed(label, bool(version), seen, "torch of any build")
    if context.platform == "rocm":
        return passed(label, bool(hip) and not cuda and "+rocm" in version, seen, expected["rocm"])
    return passed(label, bool(cuda) and not hip, seen, expected["cuda"])


def base_untouched(context: Context) -> Iterator[Result]:
    """Compare every protected package with the record of the base image."""
    if context.base_record is None:
        yield skipped("base:untouched", "no --base-record given", "what the base image shipped")
        return
    recorded = json.loads(context.base_record.read_text(encoding="utf-8"))["packages"]
    found = installed_flavours((*PROTECTED, *recorded))
    for name, was in sorted(recorded.items()):
        wrong = changes({name: was}, found)
        seen = "; ".join(wrong) or f"{found[name].version}, as recorded"
        yield passed(f"base:{name}", not wrong, seen, f"{was['version']} with the base's own files")


def vllm(context: Context) -> Iterator[Result]:
    """Check vLLM's version against the tag and against what our code supports."""
    version = installed_version(*VLLM_DISTRIBUTIONS)
    expected = f"release {context.vllm_tag}" if context.vllm_tag else "the tag that was built"
    if not context.vllm_tag:
        yield skipped("vllm-version", "no --vllm-tag given", expected)
    else:
        public = version.partition("+")[0]
        yield passed("vllm-version", public == context.vllm_tag.removeprefix("v"), version or "no vllm", expected)
    try:
        inside, seen = versions.matches(version, context.vllm_window), version
    except ValueError as error:
        inside, seen = False, str(error) if version else "no vllm"
    yield passed("vllm-window", inside, seen, context.vllm_window)
    path = module_file("vllm", "_version.py")
    values = constants(path) if path else {}
    recorded = str(values.get("commit_id") or values.get("__commit_id__") or "").removeprefix("g")
    if not context.vllm_commit:
        yield skipped("vllm-commit", "no --vllm-commit given", "the pinned commit")
    elif not recorded:
        yield skipped("vllm-commit", "this build recorded none", context.vllm_commit)
    else:
        yield passed("vllm-commit", context.vllm_commit.startswith(recorded), recorded, context.vllm_commit)


def numpy_range(context: Context) -> Result:
    """Check that NumPy's version is one that everything in the image takes."""
    version = installed_version("numpy")
    try:
        good, seen = versions.matches(version, context.numpy_range), version
    except ValueError as error:
        good, seen = False, str(error) if version else "no numpy"
    return passed("numpy-range", good, seen, context.numpy_range)


def product(context: Context) -> Result:
    """Check that our packages are there; the integration package names the others."""
    ours = {name: installed_version(name.replace("_", "-")) for name in context.packages}
    seen = ", ".join(f"{name} {version}" for name, version in ours.items()) or "no vime package"
    return passed("product", "vime_integration" in ours, seen, "vime_integration and what it requires")


def requirements() -> Result:
    """Check that every requirement of ours is met, and of theirs on the protected packages nothing is asked here."""
    wrong: list[str] = []
    count = 0
    for distribution in metadata.distributions():
        name = normalise(distribution.metadata["Name"] or "")
        if not name.startswith("vime-") or name == "vime-workspace":
            continue
        for text in distribution.requires or []:
            needed, specifier, marker = parse_requirement(text)
            if "extra" in marker:
                continue
            count += 1
            version = installed_version(needed)
            if not version:
                wrong.append(f"{name} needs {needed}, which is missing")
            elif not versions.matches(version, specifier):
                wrong.append(f"{name} needs {needed}{specifier}, not {version}")
    return passed("requirements", not wrong, "; ".join(wrong) or f"{count} met", "every requirement of ours met")


def parse_requirement(text: str) -> tuple[str, str, str]:
    """Split a ``Requires-Dist`` line.

    Args:
        text: Such as ``torch>=2.6; extra == "gpu"``.

    Returns:
        Normalised name, version specifier and marker.

    Raises:
        ValueError: The line cannot be read.
    """
    match = _REQUIREMENT.fullmatch(text)
    if match is None or "@" in text.partition(";")[0]:
        raise ValueError(f"{text!r} is not a requirement that this tool reads")
    return normalise(match[1]), match[2].strip(), (match[3] or "").strip()
