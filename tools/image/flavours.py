"""The packages whose build flavour must survive every install, and how to find them in this interpreter.

A base image ships torch and its companions built for its own ROCm or CUDA. The index carries other builds of the same
names, which install without complaint and fail at the first GPU operation. These names are therefore never left to a
resolver: ``constraints.py`` pins those that are installed, and ``dry_run_guard.py`` refuses a plan that holds any.
vLLM and Megatron-Core stand among them because an image builds each from one commit, and a release is not that commit.

Standard library only, like everything in this folder: it runs in a base image before anything was installed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import metadata

PROTECTED = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "pytorch-triton-rocm",
    "vllm",
    "megatron-core",
    "flash-attn",
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-rocm",
    "apex",
    "aiter",
    "amd-aiter",
    "amdsmi",
    "torch-memory-saver",
)


class ImageError(Exception):
    """An image step that must not go on; the text says what was seen, what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class Flavour:
    """One installed distribution.

    Attributes:
        name: Normalised name.
        version: Full version, local part included: ``2.12.0+rocm7.14``.
        digest: SHA-256 of the distribution's RECORD, which lists a hash of every file; empty where it has none. Two
            builds of one version differ in it.
    """

    name: str
    version: str
    digest: str


def normalise(name: str) -> str:
    """Return the one spelling of a distribution's name (PEP 503).

    Args:
        name: Any spelling.

    Returns:
        Lower case, runs of ``-_.`` as one dash.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_flavours(names: tuple[str, ...] = PROTECTED) -> dict[str, Flavour]:
    """Find the protected distributions that this interpreter would import.

    Args:
        names: Which distributions to look for.

    Returns:
        Those that are installed, by normalised name. Where a name is on the path twice the first one counts, as it
        does for ``import``.

    Raises:
        ImageError: One of them carries no version: its metadata is broken, and it cannot be pinned.
    """
    wanted = {normalise(name) for name in names}
    found: dict[str, Flavour] = {}
    for distribution in metadata.distributions():
        name = normalise(distribution.metadata["Name"] or "")
        if name not in wanted or name in found:
            continue
        if not distribution.version:
            raise ImageError(f"{name} is installed without a version; expected metadata that can be pinned")
        found[name] = Flavour(name, distribution.version, _digest(distribution))
    return found


def _digest(distribution: metadata.Distribution) -> str:
    record = distribution.read_text("RECORD")
    # Byte-code lines come and go with the first import; they say nothing about the build.
    lines = [line for line in (record or "").splitlines() if ".pyc," not in line]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""
