"""Layers composed, and every place where readers differ."""

import pytest
from vime_devices import Node, Platform, PlatformError, VisibilityError
from vime_devices.resolve import resolve
from vime_devices.topology import Device, synthetic_node

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NVIDIA4 = synthetic_node(Platform.CUDA, 4)


@pytest.mark.parametrize(
    ("environ", "physical"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({ROCR: "4,5", HIP: "1,0"}, [5, 4]),
        ({HIP: "2,1", CUDA: "7"}, [2, 1]),
        ({CUDA: "3"}, [3]),
        ({ROCR: "4,5"}, [4, 5]),
        ({HIP: "-1"}, []),
        ({HIP: "GPU-e044801689257fb3,GPU-e044801689257fb0"}, [3, 0]),
    ],
)
def test_masks_on_which_all_agree(node8, environ, physical):
    resolution = resolve(environ, node8)
    assert resolution.disagreements == ()
    assert [device.index for device in resolution.devices()] == physical
    assert resolution.devices() == resolution.runtime == resolution.torch


@pytest.mark.parametrize(
    ("environ", "runtime", "torch"),
    [
        ({ROCR: "4,5", HIP: "4,5"}, [], [None, None]),  # torch caps by a count that ROCr does not filter
        ({ROCR: ""}, [], [None]),
        ({ROCR: "-1"}, [], [None]),
        ({ROCR: "7,9"}, [7], [7, None]),
        ({HIP: ""}, list(range(8)), []),
        ({HIP: "", CUDA: "3"}, [3], []),
        ({HIP: "0, 1"}, [0], [0, 1]),
        ({HIP: "0,0,1"}, [0, 1], []),
        ({HIP: "01"}, [], [1]),
        ({HIP: "GPU-E044801689257FB3"}, [], []),
        ({HIP: "GPU-"}, [0], []),
    ],
)
def test_masks_on_which_torch_and_the_runtime_differ(node8, environ, runtime, torch):
    resolution = resolve(environ, node8)
    assert [device.index for device in resolution.runtime] == runtime
    assert resolution.torch is not None
    assert [device and device.index for device in resolution.torch] == torch
    if runtime != torch:
        assert "before it initialises" in resolution.disagreements[-1]
        with pytest.raises(VisibilityError, match="no single meaning") as caught:
            resolution.devices()
        assert caught.value.seen in " | ".join(resolution.disagreements)


def test_an_outcome_that_is_not_defined_is_a_disagreement(node8):
    resolution = resolve({ROCR: "0,,1"}, node8)
    assert resolution.disagreements[0] == "rocr: an empty token is read out of bounds (outcome not defined)"


def test_masks_that_torch_refuses(node8):
    resolution = resolve({ROCR: "4", HIP: "0,1"}, node8)
    assert [device.index for device in resolution.runtime] == [4]
    assert resolution.torch is None
    assert "longer than the ROCr list" in resolution.disagreements[0]


def test_uuids_of_torch_count_below_rocr(node8):
    uuid = node8.devices[5].uuid
    resolution = resolve({ROCR: "4,5", HIP: uuid}, node8)
    assert resolution.disagreements == ()
    assert resolution.devices() == (node8.devices[5],)


def test_hip_before_6_2(node8):
    assert resolve({HIP: node8.devices[5].uuid}, node8, rocm=(6, 1)).runtime == ()


@pytest.mark.parametrize(
    ("text", "physical"), [("2,1", [2, 1]), ("-1", []), ("", []), (NVIDIA4.devices[3].uuid, [3]), ("0, 1", [0, 1])]
)
def test_cuda(text, physical):
    resolution = resolve({CUDA: text, HIP: "0", ROCR: "0"}, NVIDIA4)
    assert [device.index for device in resolution.devices()] == physical


def test_cuda_with_mig_is_the_drivers_to_count():
    mig = Device(4, NVIDIA4.devices[0].id, "MIG-9a8b7c6d-0000-4000-8000-000000000001", "0000:01:00.0")
    resolution = resolve({CUDA: mig.uuid}, Node(Platform.CUDA, (*NVIDIA4.devices, mig)))
    assert resolution.torch is None
    assert resolution.devices() == (mig,)


def test_the_cpu_platform_has_nothing_to_resolve():
    with pytest.raises(PlatformError, match="nothing to resolve"):
        resolve({}, Node(Platform.CPU, ()))
