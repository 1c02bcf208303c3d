"""Checks of the accelerators: which there are, what vime-devices' preflight says, and how much memory is free.

Memory is asked for in a fresh interpreter with a deadline. Initialising a runtime in this process would fix its masks
for good, and a driver that hangs would hang the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vime_devices import Node, Platform, detect_platform, discover_node, visible_devices
from vime_devices.platforms import torch_build
from vime_devices.preflight import Severity, check_process, take_snapshot

from vime_integration.doctor.findings import Check, Status, size

ASK_DEADLINE_S = 120.0
BUSY_SHARE = 0.10  # of a device's memory, held by others: an engine's share would not fit

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


def check_devices(expect: Platform | None = None) -> Iterator[Check]:
    """Check the accelerators.

    Args:
        expect: The platform that the run is meant for; None takes what is there.
    """
    found = detect_platform()
    if expect is not None and expect is not found:
        yield Check(
            "devices.platform",
            Status.FAIL,
            f"this host offers {found.value}",
            expect.value,
            "pass the devices to the container, load the driver, or choose another platform",
        )
        return
    build = torch_build()
    if found is Platform.CPU:
        yield Check("devices.platform", Status.OK, "no accelerator: engines and trainer run on the CPU")
        return
    good = build is found
    built = build.value if build is not None else "not installed"
    yield Check(
        "devices.platform",
        Status.OK if good else Status.FAIL,
        f"{found.value} devices, torch for {built}",
        f"a torch built for {found.value}",
        "install that build; on ROCm use an image of docker/, whose torch must not be replaced",
    )
    node = discover_node(found)
    mine = visible_devices(found, os.environ, node=node)
    archs = ", ".join(sorted({device.arch for device in node.devices if device.arch})) or "unnamed"
    yield Check(
        "devices.visible",
        Status.OK if mine else Status.FAIL,
        f"{len(mine)} of the node's {len(node.devices)} devices ({archs})",
        "at least one",
        "see `vime-devices explain` for the mask that hides them",
    )
    yield from _preflight(found, node)
    yield from _memory()


def _preflight(found: Platform, node: Node) -> Iterator[Check]:
    names = {Severity.ERROR: Status.FAIL, Severity.WARNING: Status.WARN, Severity.NOTE: Status.OK}
    findings = check_process(take_snapshot("this process", found, node=node))
    for finding in findings:
        seen = f"{finding.message} ({finding.symptom})" if finding.symptom else finding.message
        yield Check(f"devices.{finding.code}", names[finding.severity], seen, "", finding.fix)
    if not findings:
        yield Check("devices.preflight", Status.OK, "vime-devices' preflight has nothing to say")


def _memory() -> Iterator[Check]:
    for index, device in enumerate(ask_memory()):
        held = device.total - device.free
        busy = held > BUSY_SHARE * device.total
        yield Check(
            f"devices.memory.{index}",
            Status.WARN if busy else Status.OK,
            f"{device.name} ({device.arch}): {size(device.free)} free of {size(device.total)}",
            f"at most {BUSY_SHARE:.0%} held by others",
            "end what holds it (`rocm-smi`, `nvidia-smi`)",
        )
