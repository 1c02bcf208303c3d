"""Device masks, device identity and IPC preflight for AMD and NVIDIA multi-process programs."""

from vime_devices.errors import DeviceError, VimeError

__all__ = ["DeviceError", "VimeError"]
