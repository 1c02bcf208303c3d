"""Reading NVML: against a stand-in library here, against the real one in test_devices_gpu.py."""

import ctypes

import pytest
from vime_devices import Platform, Relation, TopologyError, discover_node, nvml, relation

UUIDS = ("GPU-8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f", "GPU-1f2e3d4c-5b6a-4978-8899-aabbccddeeff")


class Library:
    """NVML with two GPUs; the second is cut into MIG devices, of which place 0 and 2 exist."""

    def __init__(self, names=(b"NVIDIA H200", b"NVIDIA H200"), mig=False, refuse=None, mig_code=6):
        self.names, self.mig, self.refuse, self.mig_code = names, mig, refuse, mig_code
        self.open = False

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if name.startswith("nvml") and name == object.__getattribute__(self, "refuse"):
            return lambda *_: 999
        return value

    def nvmlInit_v2(self):
        self.open = True
        return 0

    def nvmlShutdown(self):
        self.open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle, pci):
        pci._obj.domain, pci._obj.bus, pci._obj.device = 0, 0x40 + handle.value, 0
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        assert size == 96
        if handle.value > 100:
            buffer.value = f"MIG-9a8b7c6d-0000-4000-8000-{handle.value:012x}".encode()
        else:
            buffer.value = UUIDS[handle.value - 1].encode()
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = self.names[handle.value - 1]
        return 0

    def nvmlDeviceGetMigMode(self, handle, current, pending):
        if handle.value == 1:
            return 3  # not supported
        current._obj.value = pending._obj.value = int(self.mig)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle, most):
        most._obj.value = 3
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, place, handle):
        if place == 1:
            return self.mig_code
        handle._obj.value = 101 + place
        return 0


def test_whole_gpus():
    library = Library()
    node = nvml.read_nvml(library)
    assert node.platform is Platform.CUDA
    assert [device.uuid for device in node.devices] == list(UUIDS)
    assert [device.bdf for device in node.devices] == ["0000:41:00.0", "0000:42:00.0"]
    assert node.notes == ()
    assert not library.open


def test_mig_devices_follow_the_gpus():
    node = nvml.read_nvml(Library(mig=True))
    assert [device.index for device in node.devices] == [0, 1, 2, 3]
    assert [device.mode for device in node.devices] == ["", "", "MIG", "MIG"]
    assert [device.partition for device in node.devices] == [None, None, 0, 2]
    assert relation(node.devices[2].id, node.devices[3].id) is Relation.DIFFERENT


def test_gpus_of_several_kinds_are_noted():
    assert "CUDA_DEVICE_ORDER" in nvml.read_nvml(Library(names=(b"NVIDIA H200", b"NVIDIA A100"))).notes[0]


@pytest.mark.parametrize("refuse", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"])
def test_a_refusal_names_the_call(refuse):
    library = Library(refuse=refuse)
    with pytest.raises(TopologyError, match="NVML refused") as caught:
        nvml.read_nvml(library)
    assert caught.value.where == refuse
    assert not library.open


def test_a_mig_place_that_fails_otherwise_than_being_empty():
    with pytest.raises(TopologyError, match="nvmlDeviceGetMigDeviceHandleByIndex"):
        nvml.read_nvml(Library(mig=True, mig_code=4))


def test_the_library_is_looked_for_where_the_driver_puts_it(monkeypatch):
    asked = []

    def load(path):
        asked.append(path)
        if len(asked) < 2:
            raise OSError(path)
        return Library()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert len(discover_node(Platform.CUDA).devices) == 2
    assert asked == list(nvml.LIBRARIES[:2])


def test_no_library(monkeypatch):
    monkeypatch.setattr(nvml, "LIBRARIES", ("libno-such-nvml.so.1",))
    with pytest.raises(TopologyError, match="not installed"):
        nvml.read_nvml()
