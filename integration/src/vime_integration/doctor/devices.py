"""Checks of the accelerators: which there are, what vime-devices' preflight says, and how much memory is free."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vime_devices import Node, Platform, detect_platform, discover_node, visible_devices
from vime_devices.platforms import torch_build
from vime_devices.preflight import Severity, check_process, take_snapshot

from vime_integration.device_memory import ask_memory
from vime_integration.doctor.findings import Check, Status, size

BUSY_SHARE = 0.10  # of a device's memory, held by others: an engine's share would not fit


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
