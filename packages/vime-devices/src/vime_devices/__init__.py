"""Device masks, device identity and IPC preflight for AMD and NVIDIA multi-process programs."""

from vime_devices.environment import ChildEnvironment, child_environment, ray_environment, visible_devices
from vime_devices.errors import (
    DeviceError,
    IdentityError,
    MaskError,
    PlatformError,
    ProbeError,
    TopologyError,
    VimeError,
    VisibilityError,
)
from vime_devices.identity import DeviceId, Relation, Source, assign, identify, relation, require_same
from vime_devices.masks import Mask, compose, devices_at, engine_mask, parse_devices
from vime_devices.platforms import Platform, detect_platform
from vime_devices.topology import Device, Node, discover_node, read_kfd

__all__ = [
    "ChildEnvironment",
    "Device",
    "DeviceError",
    "DeviceId",
    "IdentityError",
    "Mask",
    "MaskError",
    "Node",
    "Platform",
    "PlatformError",
    "ProbeError",
    "Relation",
    "Source",
    "TopologyError",
    "VimeError",
    "VisibilityError",
    "assign",
    "child_environment",
    "compose",
    "detect_platform",
    "devices_at",
    "discover_node",
    "engine_mask",
    "identify",
    "parse_devices",
    "ray_environment",
    "read_kfd",
    "relation",
    "require_same",
    "visible_devices",
]
