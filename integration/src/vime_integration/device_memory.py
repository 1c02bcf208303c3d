"""How much memory the visible GPUs have, asked in a fresh interpreter with a deadline.

Initialising a runtime in the asking process would fix its masks for good and keep a context on the device, and a driver
that hangs would hang the asker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

ASK_DEADLINE_S = 120.0

MEMORY = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    arch = getattr(properties, "gcnArchName", "") if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    found.append({"name": properties.name, "arch": arch.partition(":")[0], "free": free, "total": total})
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One visible device.

    Attributes:
        name: The product.
        arch: ``gfx942``, ``sm_90``, ...
        free: Bytes that nobody holds.
        total: Bytes that it has.
    """

    name: str
    arch: str
    free: int
    total: int


def ask_memory(environ: Mapping[str, str] | None = None, deadline_s: float = ASK_DEADLINE_S) -> list[DeviceMemory]:
    """Ask torch, in an interpreter of its own, what devices it sees.

    Args:
        environ: The interpreter's environment; by default this process's.
        deadline_s: Seconds to wait.

    Raises:
        RuntimeError: It failed, with the end of what it said.
        TimeoutError: It did not answer.
    """
    command = [sys.executable, "-c", MEMORY]
    env = dict(os.environ if environ is None else environ)
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and text of ours
            command, env=env, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"torch did not answer within {deadline_s:g} s: the driver may hang") from error
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-400:]}")
    return [DeviceMemory(**item) for item in json.loads(done.stdout.splitlines()[-1])]
