"""Checks of one process by itself. Each says what a user would otherwise see.

The rules stand in tables by platform, so that the list of what is checked can be read in one place.
"""

from __future__ import annotations

from collections.abc import Iterator

from vime_devices import variables
from vime_devices.platforms import Platform
from vime_devices.preflight.findings import Finding, Severity
from vime_devices.preflight.hip_rules import HIP_RULES
from vime_devices.preflight.rule import Rule, finding, masks
from vime_devices.preflight.snapshot import Snapshot

ENOUGH_SHM = 1 << 30  # bytes; a container gets 64 MiB unless told otherwise, and NCCL alone wants more per rank


def check_process(snapshot: Snapshot) -> list[Finding]:
    """Run every rule that applies to one process.

    Args:
        snapshot: What it published.

    Returns:
        Findings in the order of the rules.
    """
    rules = HIP_RULES if snapshot.platform == Platform.HIP else _CUDA_RULES
    return [found for rule in (*rules, *_COMMON_RULES) for found in rule(snapshot)]


def _order_variable(snapshot: Snapshot) -> Iterator[Finding]:
    if len(snapshot.archs) > 1 and snapshot.environ.get(variables.CUDA_ORDER) != "PCI_BUS_ID":
        yield finding(
            snapshot, "cuda-order", Severity.WARNING,
            f"GPUs of several kinds ({', '.join(snapshot.archs)}) and {variables.CUDA_ORDER} is not PCI_BUS_ID",
            "CUDA numbers the fastest first, nvidia-smi and NVML by address: index N means two GPUs",
            f"set {variables.CUDA_ORDER}=PCI_BUS_ID in every process",
        )  # fmt: skip


def _disagreements(snapshot: Snapshot) -> Iterator[Finding]:
    for line in snapshot.disagreements:
        yield finding(
            snapshot, "readers-disagree", Severity.ERROR, line,
            "torch.cuda.device_count() is not the number of devices that the process can use",
            "write masks as plain decimal indices or full lower-case UUIDs, each device once",
        )  # fmt: skip


def _nothing(snapshot: Snapshot) -> Iterator[Finding]:
    hidden_on_purpose = "-1" in (text for text in masks(snapshot) if text is not None)
    if snapshot.node_devices and not snapshot.devices and not hidden_on_purpose:
        yield finding(
            snapshot, "no-devices", Severity.ERROR,
            f"the masks leave none of the node's {len(snapshot.node_devices)} devices",
            "'No HIP GPUs are available' or 'no CUDA-capable device is detected'",
            "see `vime-devices explain` for the layer at which they vanish",
        )  # fmt: skip
    if not snapshot.node_devices:
        yield finding(
            snapshot, "empty-node", Severity.ERROR, "the driver lists no device",
            "'No HIP GPUs are available' or 'no CUDA-capable device is detected'",
            "pass the devices to the container; check the driver",
        )  # fmt: skip


def _late_mask(snapshot: Snapshot) -> Iterator[Finding]:
    if 0 <= snapshot.runtime_count != len(snapshot.devices):
        yield finding(
            snapshot, "mask-ignored", Severity.ERROR,
            f"the runtime has {snapshot.runtime_count} devices, the masks now say {len(snapshot.devices)}: they were "
            "changed after it had read them",
            "the process goes on using the devices of its first mask",
            "set masks before the process starts (child_environment), not after an import",
        )  # fmt: skip
    changed = [
        name for name in (variables.ROCR, variables.HIP, variables.CUDA)
        if snapshot.started_environ.get(name) != snapshot.environ.get(name)
    ]  # fmt: skip
    if changed and snapshot.torch_imported:
        yield finding(
            snapshot, "mask-changed", Severity.WARNING,
            f"{', '.join(changed)} changed since the process started, and torch is imported",
            "an import that touched the runtime has frozen the earlier mask",
            "set masks before the process starts (child_environment)",
        )  # fmt: skip


def _ids(snapshot: Snapshot) -> Iterator[Finding]:
    for note in snapshot.node_notes:
        yield finding(
            snapshot, "node-note", Severity.WARNING, note,
            "devices that share or lack ids look equal to programs that compare them",
            "compare canonical ids (vime_devices.relation), not torch's or amdsmi's texts",
        )  # fmt: skip


def _allocator(snapshot: Snapshot) -> Iterator[Finding]:
    if not snapshot.expandable_segments:
        return
    blocked = ""
    if snapshot.seccomp == 2 or snapshot.ptrace_scope > 0:
        blocked = f" (seccomp mode {snapshot.seccomp} or ptrace_scope {snapshot.ptrace_scope} may forbid it)"
    yield finding(
        snapshot, "expandable-segments", Severity.WARNING,
        f"torch's allocator uses expandable segments: memory is shared by file descriptor (pidfd_getfd){blocked}",
        "'pidfd_getfd: Operation not permitted', slow opens, or handles that change between exports",
        "turn expandable_segments off in processes that export; else allow ptrace in the container",
    )  # fmt: skip


def _shm(snapshot: Snapshot) -> Iterator[Finding]:
    if 0 <= snapshot.shm_bytes < ENOUGH_SHM:
        yield finding(
            snapshot, "small-shm", Severity.WARNING,
            f"shared memory (/dev/shm) holds {snapshot.shm_bytes >> 20} MiB",
            "'Bus error', or NCCL/RCCL 'No space left on device' while it sets up",
            "start the container with --ipc=host, or a larger --shm-size",
        )  # fmt: skip


_CUDA_RULES: tuple[Rule, ...] = (_order_variable,)
_COMMON_RULES: tuple[Rule, ...] = (_disagreements, _nothing, _late_mask, _ids, _allocator, _shm)
