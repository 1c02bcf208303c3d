"""No process may hold two copies of one ROCm library.

A ROCm runtime can come twice: with torch's wheels (``_rocm_sdk_*`` in site-packages, or ``torch/lib``) and as an
installation under ``/opt/rocm``. Two copies of comgr or LLVM in one process end it with "registered more than once";
two copies of the HIP runtime do worse, they work and disagree about devices and memory.

Two checks: what was really mapped after everything was imported, and what the loader would find by bare name
(``LD_PRELOAD``, ``LD_LIBRARY_PATH``, the loader's cache) beside what torch brings. The second one sees the copy that
is taken only when the first program asks for it. Links to one file, and files of one content, are one copy.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from verify.context import Context, module_file
from verify.interpreters import Orders
from verify.report import Result, passed, skipped

# Stems of the libraries that keep process-wide state. Kernel libraries (rocBLAS, ...) are left out: a second copy
# costs memory and nothing else.
FAMILIES = ("libamd_comgr", "libLLVM", "libamdhip64", "libhsa-runtime64", "librccl", "libroctracer64", "libhiprtc")
# A distribution's own libLLVM (Mesa's) lies beside ROCm's on most machines and harms nothing until both are mapped.
LOADABLE = tuple(stem for stem in FAMILIES if stem != "libLLVM")
_CACHE_LINE = re.compile(r"=> (/\S+)$", re.MULTILINE)


def check_libraries(context: Context, orders: Orders) -> list[Result]:
    """Make both checks.

    Args:
        context: The environment.
        orders: The ordered imports, with what they mapped.

    Returns:
        ``libraries:mapped`` and ``libraries:loadable``.
    """
    expected = "at most one copy of " + ", ".join(FAMILIES)
    if context.platform != "rocm":
        why = f"only ROCm comes in two copies; this is a {context.platform} image"
        return [skipped(f"libraries:{name}", why, expected) for name in ("mapped", "loadable")]
    return [mapped_once(orders, expected), loadable_once(os.environ, expected)]


def mapped_once(orders: Orders, expected: str) -> Result:
    """Check what the ordered imports had mapped when they ended."""
    label = "libraries:mapped"
    if orders.duplicate_llvm:
        return passed(label, False, "two copies of LLVM registered their options and the process aborted", expected)
    if not orders.mapped:
        return passed(label, False, "no import order survived to be looked at", expected)
    wrong: dict[str, list[str]] = {}
    for paths in orders.mapped.values():
        wrong.update(duplicates(map(Path, paths)))
    return passed(label, not wrong, _text(wrong) or f"{max(map(len, orders.mapped.values()))} libraries", expected)


def loadable_once(environ: Mapping[str, str], expected: str) -> Result:
    """Check what the loader would find by bare name beside what torch brings."""
    paths = [Path(text) for text in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if "/" in text]
    folders = [Path(text) for text in environ.get("LD_LIBRARY_PATH", "").split(":") if text]
    folders += torch_folders()
    for folder in folders:
        paths += [path for stem in LOADABLE for path in folder.glob(f"{stem}.so*")]
    paths += [path for path in loader_cache() if _family(path) in LOADABLE]
    wrong = duplicates(paths)
    return passed("libraries:loadable", not wrong, _text(wrong) or f"{len(paths)} files, no two copies", expected)


def duplicates(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Find libraries that are there in more than one copy.

    Args:
        paths: Files, in any number and under any name.

    Returns:
        Real paths by library stem, where they hold different contents.
    """
    copies: dict[str, dict[str, str]] = defaultdict(dict)
    for path in paths:
        family = _family(path)
        real = path.resolve()
        if family and real.is_file():
            copies[family].setdefault(_content(real), str(real))
    return {family: sorted(found.values()) for family, found in copies.items() if len(found) > 1}


def torch_folders() -> list[Path]:
    """Return the folders from which torch loads its ROCm libraries, those that exist."""
    torch = module_file("torch", "__init__.py")
    if torch is None:
        return []
    site = torch.parent.parent
    folders = [
        torch.parent / "lib",
        *sorted(site.glob("_rocm_sdk_*/lib")),
        *sorted(site.glob("_rocm_sdk_*/lib/llvm/lib")),
    ]
    return [folder for folder in folders if folder.is_dir()]


def loader_cache() -> list[Path]:
    """Return the libraries of the dynamic loader's cache; none where there is no glibc loader."""
    for command in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if Path(command).exists():
            done = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=30, check=False)
            return [Path(path) for path in _CACHE_LINE.findall(done.stdout)]
    return []


def _family(path: Path) -> str:
    return next((stem for stem in FAMILIES if re.match(rf"{re.escape(stem)}[-.\d]*\.so", path.name)), "")


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(wrong: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{family}: {' and '.join(paths)}" for family, paths in sorted(wrong.items()))
