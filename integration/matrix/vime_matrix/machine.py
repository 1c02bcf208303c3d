"""Why a check of the matrix cannot be made on this machine; an empty text where it can.

A machine is not at fault for what it lacks, so these are skips, and the reason goes into the table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vime_matrix.definition import Cell, Definition

ENVIRONMENT_BYTES = 12 << 30  # a fresh environment, where the package cache is on another disk
FIND_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has.

    Attributes:
        cores: CPU cores.
        gpus: NVIDIA GPUs.
        rocm: Whether it has AMD GPUs: there torch and vLLM are the image's own and cannot be varied.
        free_bytes: Room for environments.
    """

    cores: int
    gpus: int
    rocm: bool
    free_bytes: int

    def describe(self) -> str:
        """Return one clause for the record."""
        kind = "AMD GPUs" if self.rocm else f"{self.gpus} NVIDIA GPUs" if self.gpus else "no GPU"
        return f"{os.uname().machine}, {self.cores} cores, {kind}"


def this_machine(folder: Path) -> Machine:
    """Look at this machine.

    Args:
        folder: Where environments will be.
    """
    nvidia = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        gpus=len(nvidia),
        rocm=Path("/dev/kfd").exists(),
        free_bytes=shutil.disk_usage(there).free,
    )


def why_no_environment(cell: Cell, machine: Machine, uv: Path) -> str:
    """Say why an environment cannot be made here.

    Args:
        cell: A cell of it.
        machine: This machine.
        uv: The resolver, which also finds interpreters.
    """
    if machine.rocm:
        return "on ROCm torch and vLLM are the image's own; run `vime-grpo accept --platform rocm` there"
    if machine.free_bytes < ENVIRONMENT_BYTES:
        return f"{machine.free_bytes >> 30} GiB free, an environment may take {ENVIRONMENT_BYTES >> 30}"
    if not interpreter(cell.python, uv):
        return f"no Python {cell.python} on this machine"
    return ""


def why_no_pipeline(definition: Definition, cell: Cell, machine: Machine) -> str:
    """Say why a pipeline of a cell cannot be run here.

    Args:
        definition: The matrix; the first pipeline of an environment is the witness of what is refused there.
        cell: The cell.
        machine: This machine.
    """
    tp = int(cell.tp)
    if machine.gpus:
        needed = 2 * tp if cell.mode == "async" else tp
        return "" if machine.gpus >= needed else f"needs {needed} GPUs, this machine has {machine.gpus}"
    rule, witness = definition.refusal(cell), definition.environments()[cell.environment]
    if rule is not None and cell != witness:
        return f"refused by name ({rule.error}), as {witness.pipeline.replace('-', ' ')} shows: {rule.reason}"
    if machine.cores < tp:
        return f"needs {tp} cores, this machine has {machine.cores}"
    return ""


def interpreter(version: str, uv: Path) -> str:
    """Return the path of an interpreter; nothing is downloaded, and nothing returned where there is none."""
    command = [str(uv), "python", "find", "--no-python-downloads", "--no-project", version]
    done = subprocess.run(  # noqa: S603 - uv, and a version from the definition
        command, capture_output=True, text=True, timeout=FIND_DEADLINE_S, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
