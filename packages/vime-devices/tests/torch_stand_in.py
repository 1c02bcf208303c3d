"""The part of torch that the probe's worker calls, over files: memory of one process that another can open.

A test copies it to ``torch.py`` on a path of its own, so that the real worker and controller run whole on a host
without devices. An ordinal must exist in the process that opens, as on a real device. What torch itself does is held
to the same worker by test_devices_gpu.py.
"""

import ctypes
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

__version__ = "stand-in"
version = SimpleNamespace(hip=None, cuda="stand-in")
uint8 = "uint8"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
UUIDS = ("8e4d6b1c-4a55-4c0b-9e0e-3a1c4f5d6e7f", "1f2e3d4c-5b6a-4978-8899-aabbccddeeff")
SEEN = [UUIDS[int(token)] if token.isdigit() else token.removeprefix("GPU-") for token in VISIBLE if token != "-1"]


def _check(ordinal):
    if ordinal >= len(SEEN):
        raise RuntimeError("CUDA error: invalid device ordinal\nand more lines")


def _init():
    print("a library that chats on standard output")
    if not SEEN:
        raise RuntimeError("No CUDA GPUs are available")


cuda = SimpleNamespace(
    init=_init,
    device_count=lambda: len(SEEN),
    get_device_properties=lambda ordinal: SimpleNamespace(uuid=SEEN[ordinal], name="stand-in"),
    set_device=_check,
    synchronize=_check,
)


class Tensor:
    def __init__(self, data, ordinal=0):
        self.data, self.device = data, SimpleNamespace(index=ordinal)
        self.buffer = (ctypes.c_char * len(data)).from_buffer_copy(data) if data else None

    def to(self, device):
        return Tensor(self.data, int(device.removeprefix("cuda:")))

    def untyped_storage(self):
        return self

    def _share_cuda_(self):
        with tempfile.NamedTemporaryFile(dir=os.environ["STAND_IN_MEMORY"], delete=False) as file:
            file.write(self.data)
        return (self.device.index, file.name.encode(), len(self.data), 0, b"counter", 0, b"event", False)

    def set_(self, storage):
        return storage

    def cpu(self):
        return self

    contiguous = cpu

    def numel(self):
        return len(self.data)

    def data_ptr(self):
        return ctypes.addressof(self.buffer)


class UntypedStorage:
    @staticmethod
    def _new_shared_cuda(ordinal, handle, size, offset, counter, counter_offset, event, event_sync):
        _check(ordinal)
        assert (offset, counter, counter_offset, event, event_sync) == (0, b"counter", 0, b"event", False)
        return Tensor(Path(handle.decode()).read_bytes()[:size], ordinal)


def frombuffer(data, dtype):
    assert dtype == uint8
    return Tensor(bytes(data))


def empty(count, dtype, device):
    assert (count, dtype) == (0, uint8)
    return Tensor(b"", device.index)
