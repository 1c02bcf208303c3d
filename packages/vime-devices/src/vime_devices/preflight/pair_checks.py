"""Checks of an exporter against an importer: may one open the other's memory, and will it be the right memory?

HIP from ROCm 7 on looks the exporter's ordinal up in the importer's list. An ordinal that does not exist there fails;
one that denotes another GPU opens, with peer access enabled for that other GPU. The published own-first masks rely on
the second case being harmless, which was seen on ROCm 7.14 and is not promised, so it is a warning here, not an error.
CUDA resolves the memory in the driver, but torch passes the exporter's ordinal along: an importer that uses it as it
came needs that ordinal to exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from vime_devices.platforms import Platform
from vime_devices.preflight.findings import Finding, Severity
from vime_devices.preflight.mending import mend
from vime_devices.preflight.process_checks import check_process
from vime_devices.preflight.snapshot import SeenDevice, Snapshot

PairRule = Callable[[Snapshot, Snapshot], Iterator[Finding]]


def check_all(snapshots: Sequence[Snapshot]) -> list[Finding]:
    """Check every process, and every ordered pair of processes.

    Args:
        snapshots: What the processes of the job published; those on other machines are paired with their own.

    Returns:
        The findings, errors first.
    """
    findings = [finding for snapshot in snapshots for finding in check_process(snapshot)]
    for exporter, importer in permutations(snapshots, 2):
        findings += check_pair(exporter, importer)
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def check_pair(exporter: Snapshot, importer: Snapshot) -> list[Finding]:
    """Decide whether one process can open what another exports.

    Args:
        exporter: The process that owns the memory; its ``own`` ordinals are those that it exports on.
        importer: The process that opens it.

    Returns:
        The findings; none for processes of different machines, between which there is no IPC.
    """
    if exporter.boot_id != importer.boot_id:
        return []
    if exporter.platform != importer.platform:
        return [
            _finding(
                exporter, importer, "platforms-differ", Severity.ERROR,
                f"the exporter is on {exporter.platform}, the importer on {importer.platform}",
                "no handle of one runtime means anything to the other",
                "start both processes on one platform",
            )
        ]  # fmt: skip
    hip = exporter.platform == Platform.HIP
    rules = (*_COMMON, *_HIP) if hip else (*_COMMON, _cuda_ordinals)
    return [finding for rule in rules for finding in rule(exporter, importer)]


def _finding(
    exporter: Snapshot, importer: Snapshot, code: str, severity: Severity, message: str, symptom: str, fix: str
) -> Finding:
    return Finding(code, severity, message, symptom, fix, f"{exporter.name} -> {importer.name}")


def _enumeration(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    ours, theirs = ([(d.physical, d.id) for d in s.node_devices] for s in (exporter, importer))
    if ours != theirs:
        yield _finding(
            exporter, importer, "nodes-differ", Severity.ERROR,
            f"the two list the machine's devices differently ({len(ours)} and {len(theirs)} devices)",
            "one index is two GPUs: memory is opened on, or copied to, the wrong one",
            "give both containers the same device nodes; after a change of partition mode restart both",
        )  # fmt: skip


def _shared_memory(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    if -1 not in (exporter.shm_device, importer.shm_device) and exporter.shm_device != importer.shm_device:
        yield _finding(
            exporter, importer, "shm-differs", Severity.ERROR,
            "the two do not share /dev/shm, where torch keeps the reference counts of exported tensors",
            "'unable to open shared memory object' in rebuild_cuda_tensor",
            "run both in one container, or with --ipc=host",
        )  # fmt: skip


def _pid_namespace(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    if _differs(exporter, importer, "pid"):
        yield _finding(
            exporter, importer, "pid-namespace", Severity.ERROR,
            "the two are in different pid namespaces, and handles name the exporter by its pid",
            "'invalid argument' or 'invalid resource handle' when the handle is opened",
            "run both in one container, or with --pid=host",
        )  # fmt: skip


def _network_namespace(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    if _differs(exporter, importer, "net") and "legacy" not in (exporter.ipc_mode, importer.ipc_mode):
        yield _finding(
            exporter, importer, "net-namespace", Severity.ERROR,
            "the two are in different network namespaces; dmabuf handles travel over a socket that lives in one",
            "the open waits about 10 s and fails",
            "run both in one container or pod, or with --network=host",
        )  # fmt: skip


def _ipc_modes(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    if exporter.ipc_mode != importer.ipc_mode:
        yield _finding(
            exporter, importer, "ipc-modes-differ", Severity.ERROR,
            f"the exporter's IPC mode is {exporter.ipc_mode}, the importer's {importer.ipc_mode}",
            "a handle of one kind is opened as the other: 'invalid argument'",
            "set HSA_ENABLE_IPC_MODE_LEGACY alike, or nowhere",
        )  # fmt: skip


def _versions(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    if exporter.runtime_version != importer.runtime_version:
        yield _finding(
            exporter, importer, "versions-differ", Severity.WARNING,
            f"ROCm {exporter.runtime_version or 'unknown'} and {importer.runtime_version or 'unknown'}; what a handle "
            "holds changed in ROCm 7",
            "a handle is read by another layout than it was written by",
            "run both from one image",
        )  # fmt: skip


def _hip_ordinals(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    for device in _exported(exporter):
        fix = _mask_fix(exporter, importer)
        if device.ordinal >= len(importer.devices):
            yield _finding(
                exporter, importer, "ipc-ordinal-missing", Severity.ERROR,
                f"the exporter's ordinal {device.ordinal} ({device.id}) does not exist in the importer, which sees "
                f"{len(importer.devices)} devices",
                "hipErrorInvalidValue in _new_shared_cuda: 'invalid device ordinal' (ROCm 7 and later)",
                fix,
            )  # fmt: skip
        elif importer.devices[device.ordinal].id != device.id:
            yield _finding(
                exporter, importer, "ipc-other-device", Severity.WARNING,
                f"the exporter's ordinal {device.ordinal} is {device.id}, the importer's is "
                f"{importer.devices[device.ordinal].id}: the memory opens, and peer access is enabled for the latter",
                "none was reported; the mapping did not depend on the device on ROCm 7.14",
                fix,
            )  # fmt: skip


def _cuda_ordinals(exporter: Snapshot, importer: Snapshot) -> Iterator[Finding]:
    for device in _exported(exporter):
        if device.ordinal >= len(importer.devices):
            yield _finding(
                exporter, importer, "ipc-ordinal-as-exported", Severity.WARNING,
                f"the exporter's ordinal {device.ordinal} does not exist in the importer, which sees "
                f"{len(importer.devices)} devices; torch passes that ordinal along",
                "'invalid device ordinal' in rebuild_cuda_tensor, unless the importer puts its own index there",
                "replace the device argument of rebuild_cuda_tensor by the importer's own index",
            )  # fmt: skip


def _exported(exporter: Snapshot) -> list[SeenDevice]:
    return [device for device in exporter.devices if device.ordinal in exporter.own]


def _mask_fix(exporter: Snapshot, importer: Snapshot) -> str:
    exported = [device.ordinal for device in _exported(exporter)]
    known = {device.id: device for device in (*exporter.devices, *importer.devices)}
    mended = mend([d.id for d in exporter.devices], exported, [d.id for d in importer.devices])
    mask = ",".join(str(known[item].physical) for item in mended)
    own = [mended.index(device.id) for device in importer.devices if device.ordinal in importer.own]
    places = ",".join(map(str, own)) or "none"
    return f"start the importer with HIP and CUDA masks {mask} (its own devices are then ordinals {places})"


def _differs(exporter: Snapshot, importer: Snapshot, kind: str) -> bool:
    ours, theirs = exporter.namespaces.get(kind, ""), importer.namespaces.get(kind, "")
    return bool(ours and theirs) and ours != theirs


_COMMON: tuple[PairRule, ...] = (_enumeration, _shared_memory, _pid_namespace)
_HIP: tuple[PairRule, ...] = (_hip_ordinals, _network_namespace, _ipc_modes, _versions)
