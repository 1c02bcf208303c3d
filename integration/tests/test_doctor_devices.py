"""The doctor's checks of accelerators, on a made-up node: there is none where the tests run."""

from __future__ import annotations

import pytest
from vime_devices import Platform, child_environment
from vime_devices.testing import synthetic_node
from vime_integration import device_memory
from vime_integration.device_memory import DeviceMemory, ask_memory
from vime_integration.doctor import Check, Status, devices
from vime_integration.doctor.devices import check_devices
from vime_integration.doctor.findings import guarded

GIB = 2**30
GPUS = 4


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four HIP devices, of which somebody holds half of the last one's memory."""
    for name in child_environment(Platform.HIP, own=[0], node=range(GPUS), base={}).env:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "detect_platform", lambda: Platform.HIP)
    monkeypatch.setattr(devices, "torch_build", lambda: Platform.HIP)
    monkeypatch.setattr(devices, "discover_node", lambda _platform: synthetic_node(Platform.HIP, GPUS))
    free = [192, 192, 192, 96]
    monkeypatch.setattr(
        devices, "ask_memory", lambda: [DeviceMemory("MI300X", "gfx942", size * GIB, 192 * GIB) for size in free]
    )


def found() -> dict[str, Check]:
    return {check.name: check for check in guarded("devices", check_devices)}


@pytest.mark.usefixtures("node")
def test_every_device_is_visible_and_a_busy_one_is_named() -> None:
    checks = found()
    assert checks["devices.platform"].status is Status.OK
    assert checks["devices.visible"].seen.startswith("4 of the node's 4")
    assert [checks[f"devices.memory.{index}"].status for index in range(GPUS)] == [Status.OK] * 3 + [Status.WARN]
    assert "96.0 GiB free of 192.0 GiB" in checks["devices.memory.3"].seen


@pytest.mark.usefixtures("node")
def test_a_torch_for_another_vendor_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: Platform.CUDA)
    check = found()["devices.platform"]
    assert check.status is Status.FAIL
    assert "must not be replaced" in check.fix
    monkeypatch.setattr(devices, "torch_build", lambda: None)
    assert "not installed" in found()["devices.platform"].seen


@pytest.mark.usefixtures("node")
def test_masks_that_contradict_each_other_are_a_failure_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(child_environment(Platform.HIP, own=[0], node=range(GPUS), base={}).env)
    for name, mask in zip(names, ("0", "1"), strict=True):
        monkeypatch.setenv(name, mask)
    check = found()["devices"]
    assert check.status is Status.FAIL
    assert "masks differ" in check.seen


@pytest.mark.usefixtures("node")
def test_hidden_devices_are_counted_and_preflight_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mask in child_environment(Platform.HIP, own=[2], node=range(GPUS), base={}).env.items():
        monkeypatch.setenv(name, mask.partition(",")[0])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    checks = found()
    assert checks["devices.visible"].seen.startswith("1 of the node's 4")
    assert checks["devices.expandable-segments"].status is Status.WARN
    assert checks["devices.expandable-segments"].fix


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    assert all(isinstance(device, DeviceMemory) for device in ask_memory())


def test_a_driver_that_fails_or_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "MEMORY", "raise SystemExit('no HIP GPUs are available')")
    with pytest.raises(RuntimeError, match="no HIP GPUs are available"):
        ask_memory()
    monkeypatch.setattr(device_memory, "MEMORY", "import time; time.sleep(600)")
    with pytest.raises(TimeoutError, match="may hang"):
        ask_memory(deadline_s=0.5)
