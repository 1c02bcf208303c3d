"""Snapshots, the rules about one process, the rules about two, and the mask that mends a pair."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vime_devices import DeviceError, MaskError, Platform
from vime_devices.preflight import (
    Finding,
    Severity,
    Snapshot,
    check_all,
    check_pair,
    check_process,
    mend,
    take_snapshot,
)
from vime_devices.preflight.snapshot import SeenDevice
from vime_devices.topology import Node, synthetic_node

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def codes(findings):
    return [finding.code for finding in findings]


def test_a_healthy_process_has_no_findings(snap):
    assert check_process(snap()) == []
    assert check_all([snap("one"), snap("two")]) == []


def test_a_snapshot_survives_json(snap):
    taken = snap("rank 3", {HIP: "3,0"}, own=(0,))
    assert Snapshot.from_json(json.loads(json.dumps(taken.to_json()))) == taken


def test_what_is_no_snapshot(snap, node8):
    for data, match in (
        (snap().to_json() | {"unknown": 1}, "not a snapshot"),
        (snap().to_json() | {"devices": 3}, "not a snapshot"),
        ([1], "not a snapshot"),
        ({}, "not a snapshot"),
        (snap().to_json() | {"snapshot_version": 0}, "another version"),
    ):
        with pytest.raises(DeviceError, match=match):
            Snapshot.from_json(data)
    with pytest.raises(MaskError, match="own ordinals"):
        take_snapshot("rank 3", Platform.HIP, environ={HIP: "3"}, node=node8, own=[3])


def test_this_process(node8, monkeypatch):
    monkeypatch.setenv(HIP, "2,1")
    monkeypatch.delenv(CUDA, raising=False)
    monkeypatch.delenv(ROCR, raising=False)
    taken = take_snapshot("me", Platform.HIP, node=node8)
    assert [device.physical for device in taken.devices] == [2, 1]
    assert (taken.own, taken.pid, taken.environ[HIP]) == ((0, 1), os.getpid(), "2,1")
    assert taken.nofile > 0
    assert taken.namespaces["net"].startswith("net:[")
    assert HIP not in taken.started_environ


def root_of(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def test_another_root(tmp_path, node8):
    root = root_of(
        tmp_path,
        {
            "proc/self/environ": f"{HIP}=0\0PATH=/bin\0".encode(),
            "proc/self/status": "Name:\tpython\nSeccomp:\t2\n",
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "opt/rocm/.info/version": "7.14.0-77\n",
            "sys/module/amdgpu/version": "6.14.14\n",
        },
    )
    taken = take_snapshot("p", Platform.HIP, environ={}, node=node8, own=[3], root=root)
    assert (taken.seccomp, taken.ptrace_scope, taken.own) == (2, 1, (3,))
    assert (taken.runtime_version, taken.kernel_driver) == ("7.14.0-77", "dkms 6.14.14")
    assert taken.started_environ == {HIP: "0"}
    assert taken.shm_bytes > 0
    (root / "sys/module/amdgpu/version").unlink()
    assert take_snapshot("p", Platform.HIP, environ={}, node=node8, root=root).kernel_driver == "in-tree"


def test_a_root_that_hides_everything(tmp_path, node8):
    taken = take_snapshot("p", Platform.HIP, environ={}, node=node8, root=tmp_path)
    assert (taken.seccomp, taken.shm_device, taken.runtime_version, taken.kernel_driver) == (-1, -1, "", "")
    assert taken.started_environ == {}
    assert set(taken.namespaces.values()) == {""}


def test_the_nvidia_drivers_version(tmp_path):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    root = root_of(tmp_path, {"proc/driver/nvidia/version": line})
    taken = take_snapshot("p", Platform.CUDA, environ={}, node=synthetic_node(Platform.CUDA, 1), root=root)
    assert (taken.runtime_version, taken.kernel_driver) == ("580.159.04", "")


@pytest.mark.parametrize(("initialised", "count"), [(True, 5), (False, -1)])
def test_torch_is_asked_only_where_it_is_imported(node8, monkeypatch, initialised, count):
    cuda = SimpleNamespace(is_initialized=lambda: initialised, device_count=lambda: 5)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    taken = take_snapshot("p", Platform.HIP, environ={}, node=node8)
    assert (taken.torch_imported, taken.runtime_count) == (True, count)
    monkeypatch.delitem(sys.modules, "torch")
    assert not take_snapshot("p", Platform.HIP, environ={}, node=node8).torch_imported


@pytest.mark.parametrize(("text", "mode"), [(None, "default"), ("1", "legacy"), ("0", "dmabuf"), ("true", "dmabuf")])
def test_ipc_mode(snap, text, mode):
    assert snap(environ={} if text is None else {"HSA_ENABLE_IPC_MODE_LEGACY": text}).ipc_mode == mode


@pytest.mark.parametrize(
    ("fields", "code", "severity"),
    [
        ({"environ": {ROCR: "0", HIP: "0"}}, "rocr-with-hip", "error"),
        ({"environ": {ROCR: "0", CUDA: "0"}}, "rocr-with-hip", "error"),
        ({"environ": {ROCR: "0"}}, "ray-rocr", "error"),
        ({"environ": {HIP: "0,1", CUDA: "1,0"}}, "hip-cuda-differ", "error"),
        ({"environ": {CUDA: "-1"}}, "cuda-hides-amd", "warning"),
        ({"environ": {CUDA: "0"}}, "cuda-only", "warning"),
        ({"environ": {HIP: ""}}, "empty-mask", "error"),
        ({"environ": {CUDA: ""}}, "empty-mask", "error"),
        ({"environ": {"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1"}}, "noset-rocr", "warning"),
        ({"environ": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "0"}}, "noset-value", "warning"),
        ({"environ": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}, "noset-cuda-on-amd", "warning"),
        ({"environ": {HIP: "3", CUDA: "3"}}, "narrow-mask", "warning"),
        ({"environ": {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}, "kernel_driver": "in-tree"}, "legacy-ipc", "error"),
        ({"archs": ("gfx950",)}, "mi350-export", "note"),
        ({"hidden_nodes": 4}, "hidden-nodes", "warning"),
        ({"nofile": 1024}, "few-files", "warning"),
        ({"environ": {HIP: "0,0"}}, "readers-disagree", "error"),
        ({"environ": {HIP: "9"}}, "no-devices", "error"),
        ({"node_devices": (), "devices": ()}, "empty-node", "error"),
        ({"runtime_count": 1}, "mask-ignored", "error"),
        ({"started_environ": {HIP: "0"}, "torch_imported": True}, "mask-changed", "warning"),
        ({"node_notes": ("an id was replaced",)}, "node-note", "warning"),
        ({"environ": {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}}, "expandable-segments", "warning"),
        ({"shm_bytes": 64 << 20}, "small-shm", "warning"),
    ],
)
def test_each_rule_fires_where_it_should(snap, fields, code, severity):
    found = {finding.code: finding for finding in check_process(snap("worker 7", **fields))}
    assert code in found
    finding = found[code]
    assert (finding.severity, finding.where) == (severity, "worker 7")
    assert finding.message
    assert finding.symptom
    assert finding.fix
    assert set(finding.to_json()) == {"code", "severity", "message", "symptom", "fix", "where"}


@pytest.mark.parametrize(
    "fields",
    [
        {"environ": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "True"}},
        {"environ": {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}},  # with the packaged driver
        {"environ": {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}},
        {"environ": {HIP: "-1", CUDA: "-1"}},  # hidden on purpose
        {"started_environ": {HIP: "0"}},  # changed before torch came
        {"runtime_count": 8},
        {"nofile": -1},
    ],
)
def test_no_rule_fires_where_it_should_not(snap, fields):
    assert check_process(snap(**fields)) == []


@pytest.mark.parametrize(("seccomp", "scope", "blocked"), [(2, 0, True), (0, 1, True), (0, 0, False)])
def test_what_forbids_expandable_segments(snap, seccomp, scope, blocked):
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : true"}
    (finding,) = check_process(snap(environ=environ, seccomp=seccomp, ptrace_scope=scope))
    assert ("may forbid" in finding.message) is blocked


def test_rules_of_hip_do_not_bother_cuda(snap):
    node = synthetic_node(Platform.CUDA, 4)
    assert check_process(snap(environ={CUDA: "0", ROCR: "1"}, node=node, nofile=64)) == []


def test_gpus_of_several_kinds_on_cuda(snap):
    node = synthetic_node(Platform.CUDA, 2)
    archs = ("NVIDIA A100", "NVIDIA H200")
    assert codes(check_process(snap(node=node, archs=archs))) == ["cuda-order"]
    assert check_process(snap(environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, node=node, archs=archs)) == []


@pytest.mark.parametrize(
    ("importer", "code"),
    [
        ({"namespaces": {"net": "net:[1]", "pid": "pid:[2]"}}, "pid-namespace"),
        ({"namespaces": {"net": "net:[2]", "pid": "pid:[1]"}}, "net-namespace"),
        ({"shm_device": 26}, "shm-differs"),
        ({"runtime_version": "6.3.0"}, "versions-differ"),
        ({"environ": {"HSA_ENABLE_IPC_MODE_LEGACY": "0"}}, "ipc-modes-differ"),
        ({"platform": "cuda"}, "platforms-differ"),
    ],
)
def test_each_rule_about_two_processes(snap, importer, code):
    (finding,) = check_pair(snap("one"), snap("two", **importer))
    assert (finding.code, finding.where) == (code, "one -> two")


def test_legacy_handles_cross_network_namespaces(snap):
    legacy = {"environ": {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}}
    assert check_pair(snap(**legacy), snap(**legacy, namespaces={"net": "net:[2]"})) == []


def test_unknown_values_are_no_findings(snap):
    assert check_pair(snap(), snap(shm_device=-1, namespaces={})) == []


def test_processes_of_different_machines_are_no_pair(snap):
    assert check_pair(snap(), snap("far", {HIP: "3", CUDA: "3"}, boot_id="another")) == []


def test_containers_that_list_the_node_differently(snap, node8):
    fewer = Node(Platform.HIP, tuple(replace(d, index=i) for i, d in enumerate(node8.devices[4:])))
    findings = check_pair(snap("whole", own=(0,)), snap("half", node=fewer))
    assert codes(findings) == ["nodes-differ", "ipc-other-device"]


def test_the_smallest_change_for_the_reference_fault(snap):
    trainer, engine = snap("trainer 3", own=(3,)), snap("engine 3", {HIP: "3", CUDA: "3"})
    (finding,) = check_pair(trainer, engine)
    assert (finding.code, finding.severity) == ("ipc-ordinal-missing", Severity.ERROR)
    assert finding.fix == "start the importer with HIP and CUDA masks 0,1,2,3 (its own devices are then ordinals 3)"
    assert check_pair(trainer, snap("engine 3", {HIP: "0,1,2,3", CUDA: "0,1,2,3"})) == []


def test_an_own_first_mask_is_a_warning_and_not_an_error(snap):
    engine = snap("engine", {HIP: "3,0,1,2,4,5,6,7", CUDA: "3,0,1,2,4,5,6,7"})
    (finding,) = check_pair(snap("trainer", own=(3,)), engine)
    assert (finding.code, finding.severity) == ("ipc-other-device", Severity.WARNING)


def test_cuda_needs_the_ordinal_only_where_torch_passes_it_along(snap):
    node = synthetic_node(Platform.CUDA, 2)
    trainer, engine = snap("trainer", node=node), snap("engine", {CUDA: "1"}, node=node)
    (finding,) = check_pair(trainer, engine)
    assert (finding.code, finding.severity) == ("ipc-ordinal-as-exported", Severity.WARNING)


def test_errors_come_first(snap):
    order = [f.severity for f in check_all([snap("a", {HIP: "3", CUDA: "0"}, nofile=1), snap("b", archs=("gfx950",))])]
    assert order == sorted(order, key=list(Severity).index)
    assert order[0] is Severity.ERROR
    assert order[-1] is Severity.NOTE


@st.composite
def pairs(draw):
    node = list(range(draw(st.integers(1, 8))))
    exporter = draw(st.permutations(node))[: draw(st.integers(1, len(node)))]
    importer = draw(st.permutations(node))[: draw(st.integers(0, len(node)))]
    exported = draw(st.lists(st.sampled_from(range(len(exporter))), unique=True, min_size=1))
    return exporter, exported, importer


@given(pairs())
def test_a_mended_mask_is_right_loses_nothing_and_is_stable(case):
    exporter, exported, importer = case
    mended = mend(exporter, exported, importer)
    assert all(mended[ordinal] == exporter[ordinal] for ordinal in exported)
    assert set(importer) <= set(mended) <= set(importer) | set(exporter)
    assert len(set(mended)) == len(mended)
    assert mend(exporter, exported, mended) == mended
    # No smaller list could hold both the importer's devices and the exported ordinals.
    needed = len(set(importer) | {exporter[ordinal] for ordinal in exported})
    assert len(mended) == max(needed, max(exported) + 1)


def test_findings_and_devices_are_plain_data():
    assert SeenDevice(0, "amd:e0", 3, "GPU-e0", "0000:05:00.0").physical == 3
    assert Finding("c", Severity.NOTE, "m", "s", "f").to_json()["severity"] == "note"
