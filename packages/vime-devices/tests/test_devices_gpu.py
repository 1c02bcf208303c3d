"""The real probe, NVML and snapshots, on a machine with a GPU."""

import os

import pytest
from vime_devices import Platform, Source, detect_platform, discover_node, identify
from vime_devices.preflight import take_snapshot
from vime_devices.probe import Outcome, run_probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(detect_platform() is Platform.CPU, reason="no AMD or NVIDIA device on this host"),
]


def test_own_index_always_opens_the_right_memory():
    platform = detect_platform()
    result = run_probe(platform, os.environ)
    assert {case.outcome for case in result.cases} <= {Outcome.OK, Outcome.REFUSED}
    if platform is Platform.CUDA:
        assert {case.outcome for case in result.cases if case.arm == "own"} == {Outcome.OK}


def test_the_driver_and_torch_name_the_same_devices():
    torch = pytest.importorskip("torch", reason="torch is not installed; its ids are compared here")
    platform = detect_platform()
    source = Source.TORCH_HIP if platform is Platform.HIP else Source.TORCH_CUDA
    seen = take_snapshot("test", platform).devices
    theirs = [identify(str(torch.cuda.get_device_properties(d.ordinal).uuid), source) for d in seen]
    listed = {device.id for device in discover_node(platform).devices}
    assert [str(known) for known in theirs] == [device.id for device in seen]
    assert set(theirs) <= listed
