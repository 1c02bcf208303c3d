"""The images' health check: can a job in this container still use what it was given?

It looks at what containers are most often started without, and at what can go away under a running one: the device
nodes and the right to open them, shared memory, open files. It opens no GPU and takes milliseconds, so it does not
disturb a run. ``vime-devices doctor`` and ``verify_image.py`` look deeper.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path

# Ray's object store, NCCL or RCCL and vLLM's workers all live in /dev/shm; Docker's default is 64 MiB.
ENOUGH_SHM = 8 << 30
# Below this, Ray cannot start some hundred actors with their sockets; the guide asks for 1048576.
ENOUGH_FILES = 65_536
PLATFORMS = ("rocm", "cuda")


def problems(platform: str, root: Path = Path("/")) -> list[str]:
    """List what is wrong.

    Args:
        platform: ``rocm`` or ``cuda``: which devices the image is for.
        root: Root of the file system.

    Returns:
        One sentence each, with the option of ``docker run`` that mends it.
    """
    found = _rocm(root) if platform == "rocm" else _cuda(root)
    shm = root / "dev/shm"
    if shm.is_dir():
        state = os.statvfs(shm)
        if (size := state.f_blocks * state.f_frsize) < ENOUGH_SHM:
            found.append(f"shared memory has {size >> 20} MiB, expected {ENOUGH_SHM >> 20}: --ipc=host or --shm-size")
    else:
        found.append(f"shared memory ({shm}) is missing: --ipc=host")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < ENOUGH_FILES:
        found.append(f"{files} open files allowed, expected {ENOUGH_FILES}: --ulimit nofile=1048576:1048576")
    return found


def _rocm(root: Path) -> list[str]:
    kfd = root / "dev/kfd"
    if not kfd.exists():
        return ["/dev/kfd is missing: --device=/dev/kfd --device=/dev/dri"]
    renders = sorted((root / "dev/dri").glob("renderD*"))
    if not renders:
        return ["/dev/dri holds no render node: --device=/dev/dri"]
    closed = [str(path) for path in (kfd, *renders) if not os.access(path, os.R_OK | os.W_OK)]
    return [f"no right to open {', '.join(closed)}: --group-add <group of that node>"] if closed else []


def _cuda(root: Path) -> list[str]:
    control = root / "dev/nvidiactl"
    if not control.exists():
        return ["/dev/nvidiactl is missing: --gpus all"]
    return [] if os.access(control, os.R_OK | os.W_OK) else [f"no right to open {control}"]


def main(argv: list[str] | None = None) -> int:
    """Run the program; the platform comes from ``VIME_IMAGE_PLATFORM``, which the image sets.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0 where all is well, else 1.
    """
    parser = argparse.ArgumentParser(description="Say what this container was started without; touches no GPU.")
    parser.add_argument("--platform", default=os.environ.get("VIME_IMAGE_PLATFORM", ""), help="rocm or cuda")
    platform = parser.parse_args(argv).platform
    if platform not in PLATFORMS:
        print(f"the platform is {platform!r}, expected rocm or cuda: set VIME_IMAGE_PLATFORM", file=sys.stderr)
        return 1
    found = problems(platform)
    for text in found:
        print(text, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
