"""Rules about one process on HIP: its masks, and what Ray, vLLM, RCCL and the kernel driver make of them."""

from __future__ import annotations

from collections.abc import Iterator

from vime_devices import variables
from vime_devices.preflight.findings import Finding, Severity
from vime_devices.preflight.rule import Rule, finding, masks
from vime_devices.preflight.snapshot import Snapshot

ENOUGH_FILES = 1_048_576  # what AMD's container guide asks for; a dmabuf handle costs a descriptor per open


def _rocr(snapshot: Snapshot) -> Iterator[Finding]:
    rocr, hip, cuda = masks(snapshot)
    if rocr is None:
        return
    seen = ",".join(str(device.physical) for device in snapshot.devices)
    if hip is not None or cuda is not None:
        yield finding(
            snapshot, "rocr-with-hip", Severity.ERROR,
            f"{variables.ROCR}={rocr!r} stands beside "
            f"{variables.HIP}={hip!r}, {variables.CUDA}={cuda!r}: the second counts within the first, which leaves "
            f"physical devices {seen or 'none'}",
            "'invalid device ordinal', 'No HIP GPUs are available', or another GPU than meant",
            f"unset {variables.ROCR} and set {variables.HIP} and {variables.CUDA} to {seen or 'the devices meant'}",
        )  # fmt: skip
    if hip is None:
        yield finding(
            snapshot, "ray-rocr", Severity.ERROR,
            f"{variables.ROCR}={rocr!r} is set and {variables.HIP} is not",
            "Ray stops with 'Please use HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES'",
            f"unset {variables.ROCR}; set {variables.HIP} and {variables.CUDA} to {seen or '-1'}",
        )  # fmt: skip


def _hip_and_cuda(snapshot: Snapshot) -> Iterator[Finding]:
    _, hip, cuda = masks(snapshot)
    if hip and cuda and hip != cuda:
        yield finding(
            snapshot, "hip-cuda-differ", Severity.ERROR,
            f"{variables.HIP}={hip!r} and {variables.CUDA}={cuda!r}; HIP obeys the first, other readers the second",
            "vLLM raises 'Inconsistent GPU visibility env vars'; elsewhere ranks land on the wrong GPU",
            f"set {variables.CUDA} to {hip!r}",
        )  # fmt: skip
    if hip is None and cuda == "-1":
        yield finding(
            snapshot, "cuda-hides-amd", Severity.WARNING,
            f"{variables.CUDA}='-1' and no {variables.HIP}: HIP reads the CUDA variable too",
            "AMD GPUs disappear although only NVIDIA's were meant to be hidden",
            f"unset {variables.CUDA}, or set {variables.HIP} to the devices meant",
        )  # fmt: skip
    elif hip is None and cuda:
        yield finding(
            snapshot, "cuda-only", Severity.WARNING,
            f"{variables.CUDA}={cuda!r} is set and {variables.HIP} is not; Ray's AMD manager will write the HIP one",
            "GPUs are not isolated, or vLLM raises 'Inconsistent GPU visibility env vars' in a Ray worker",
            f"set {variables.HIP} to {cuda!r} too",
        )  # fmt: skip


def _empty(snapshot: Snapshot) -> Iterator[Finding]:
    _, hip, cuda = masks(snapshot)
    name = variables.HIP if hip == "" else variables.CUDA if hip is None and cuda == "" else None
    if name is not None:
        yield finding(
            snapshot, "empty-mask", Severity.ERROR,
            f"{name} is empty: HIP reads that as unset (every device, or those of the other variable), torch as none",
            "every GPU is visible where none was meant; torch.cuda.is_available() is True while device_count() is 0",
            f"set {name} to -1 to hide all, or unset it",
        )  # fmt: skip


def _noset(snapshot: Snapshot) -> Iterator[Finding]:
    environ = snapshot.environ
    if variables.NOSET_ROCR in environ:
        yield finding(
            snapshot, "noset-rocr", Severity.WARNING,
            f"{variables.NOSET_ROCR}={environ[variables.NOSET_ROCR]!r} is set; no code in Ray reads it",
            "Ray masks its workers all the same, and a framework that trusts the variable picks the wrong local index",
            f"unset it and set {variables.NOSET_HIP}=1",
        )  # fmt: skip
    hip = environ.get(variables.NOSET_HIP)
    if hip is not None and hip.lower() not in ("1", "true"):
        yield finding(
            snapshot, "noset-value", Severity.WARNING,
            f"{variables.NOSET_HIP}={hip!r}: Ray takes only '1' and 'true', some frameworks take any text",
            "Ray and the framework each believe that the other masks the workers",
            f"set {variables.NOSET_HIP}=1, or unset it",
        )  # fmt: skip
    if hip is None and environ.get(variables.NOSET_CUDA):
        yield finding(
            snapshot, "noset-cuda-on-amd", Severity.WARNING,
            f"{variables.NOSET_CUDA} is set and {variables.NOSET_HIP} is not: Ray's AMD manager reads the HIP one",
            "Ray writes a one-device HIP mask into workers that expect to see the node; IPC then fails by ordinal",
            f"set {variables.NOSET_HIP}=1 too",
        )  # fmt: skip


def _narrow(snapshot: Snapshot) -> Iterator[Finding]:
    if 0 < len(snapshot.devices) < len(snapshot.node_devices):
        own = [device.physical for device in snapshot.devices]
        rest = [device.physical for device in snapshot.node_devices if device.physical not in own]
        yield finding(
            snapshot, "narrow-mask", Severity.WARNING,
            f"the process sees {len(own)} of the node's {len(snapshot.node_devices)} devices; on ROCm 7 and later an "
            "IPC handle's ordinal and an RCCL peer must exist in its list",
            "hipErrorInvalidValue in rebuild_cuda_tensor, or RCCL 'invalid device ordinal' at the first send",
            f"set {variables.HIP} and {variables.CUDA} to {','.join(map(str, own + rest))}",
        )  # fmt: skip


def _legacy_ipc(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.ipc_mode == "legacy" and snapshot.kernel_driver == "in-tree":
        yield finding(
            snapshot, "legacy-ipc", Severity.ERROR,
            f"{variables.IPC_LEGACY}=1 with the kernel's own amdgpu driver, which lacks the legacy IPC calls",
            "hipIpcGetMemHandle fails with 'invalid argument'; RCCL finds no peer-to-peer path",
            f"unset {variables.IPC_LEGACY} (some images set it), so that dmabuf handles are used",
        )  # fmt: skip


def _mi350(snapshot: Snapshot) -> Iterator[Finding]:
    if "gfx950" in snapshot.archs:
        yield finding(
            snapshot, "mi350-export", Severity.NOTE,
            "MI350-class devices: a second process that exports disjoint memory was reported to fail, 60 of 62 times",
            "hipIpcGetMemHandle or the open fails now and then, without a pattern by device",
            "run `vime-devices probe-ipc` on this node before a long job",
        )  # fmt: skip


def _orders(snapshot: Snapshot) -> Iterator[Finding]:
    by_address = sorted(snapshot.node_devices, key=lambda device: device.bdf)
    if [device.physical for device in by_address] != [device.physical for device in snapshot.node_devices]:
        pairs = ", ".join(f"HIP {device.physical} is number {i} by address" for i, device in enumerate(by_address))
        yield finding(
            snapshot, "order-differs", Severity.WARNING,
            f"the runtime does not number the devices by PCI address, as amdsmi and rocm-smi do: {pairs}",
            "NUMA nodes, network cards or device ids are taken from another GPU than the one in use",
            "identify devices by id or PCI address, never by index",
        )  # fmt: skip


def _hidden(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.hidden_nodes:
        yield finding(
            snapshot, "hidden-nodes", Severity.WARNING,
            f"the container hides {snapshot.hidden_nodes} GPU nodes of this machine, so its numbers are its own",
            "two containers give one GPU different ordinals, and memory shared between them is opened on another GPU",
            "pass all of /dev/dri to every container of the job and choose devices by mask",
        )  # fmt: skip


def _files(snapshot: Snapshot) -> Iterator[Finding]:
    if 0 <= snapshot.nofile < ENOUGH_FILES:
        yield finding(
            snapshot, "few-files", Severity.WARNING,
            f"the limit of open files is {snapshot.nofile}; a dmabuf handle costs one per open",
            "'Too many open files' when many actors or handles are opened",
            f"start the container with --ulimit nofile={ENOUGH_FILES}:{ENOUGH_FILES}",
        )  # fmt: skip


HIP_RULES: tuple[Rule, ...] = (
    _rocr, _hip_and_cuda, _empty, _noset, _narrow, _legacy_ipc, _mi350, _orders, _hidden, _files,
)  # fmt: skip
