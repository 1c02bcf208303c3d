"""Put the ROCm SDK that came with torch's wheels where Python and the loader look.

    python rocm_paths.py --links /opt/vime/image/lib

A base whose ROCm lives in site-packages has no ``/opt/rocm``: ``import amdsmi`` fails (vLLM's ROCm platform needs it)
and ``libamdhip64.so`` is not found by bare name (as ctypes asks for it). This writes

- a ``.pth`` file that adds the folder of the amdsmi module;
- a folder with one link to the HIP library, for the loader's configuration.

The development and the core part of the SDK may both hold the library. Links to one file are one copy; two files of
different content would be two HIP runtimes in one process, so that is refused here, before anything is built on it.

Prints the SDK's root, which builds take as ``ROCM_PATH``.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import sysconfig
from pathlib import Path

from flavours import ImageError

HIP = "libamdhip64.so"
PTH = "vime_rocm_sdk.pth"


def expose(site: Path, links: Path) -> Path:
    """Make amdsmi importable and the HIP library loadable by name.

    Args:
        site: The site folder that holds ``_rocm_sdk_core`` and ``_rocm_sdk_devel``.
        links: Folder for the link; made where it is missing.

    Returns:
        The SDK's root.

    Raises:
        ImageError: A part is missing, or there are two HIP runtimes.
    """
    core, devel = site / "_rocm_sdk_core", site / "_rocm_sdk_devel"
    amdsmi = core / "share" / "amd_smi"
    for path, what in ((core, "the SDK's core"), (devel, "its development part"), (amdsmi / "amdsmi", "amdsmi")):
        if not path.is_dir():
            raise ImageError(f"{path} is missing ({what}); expected a base whose ROCm came with torch's wheels")
    library = devel / "lib" / HIP
    copies = [library, *sorted((core / "lib").glob(f"{HIP}*"))]
    contents = {_content(path): path for path in copies if path.exists()}
    if not library.exists() or len(contents) != 1:
        seen = ", ".join(str(path) for path in contents.values()) or "none"
        raise ImageError(f"HIP runtimes under {site}: {seen}; expected one, reachable as {library}")
    (site / PTH).write_text(f"{amdsmi}\n", encoding="utf-8")
    links.mkdir(parents=True, exist_ok=True)
    link = links / HIP
    link.unlink(missing_ok=True)
    link.symlink_to(library.resolve())
    return devel


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where the base is not of that kind.
    """
    parser = argparse.ArgumentParser(description="Expose the ROCm SDK of torch's wheels.")
    parser.add_argument("--links", type=Path, required=True, help="folder for the link to the HIP library")
    parser.add_argument("--site", type=Path, default=Path(sysconfig.get_path("purelib")), help="site folder")
    options = parser.parse_args(argv)
    try:
        print(expose(options.site, options.links))
    except ImageError as error:
        print(f"rocm paths: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
