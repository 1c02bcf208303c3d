"""What a process will see: the masks composed layer by layer, and every place where two readers differ.

HIP: the node's devices -> ROCr mask -> HIP mask (its indices count in what ROCr left) -> ordinals. torch, asked before
it initialises a device, reads the same variables by rules of its own; what it would count stands beside the runtime's
answer. Where the two differ, or a reader's outcome is not defined, the resolution says so and ``devices()`` refuses to
choose. CUDA: the driver reads its one variable; torch likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vime_devices import variables
from vime_devices.errors import PlatformError, VisibilityError
from vime_devices.parsers import Reading, hip_source, read_cuda, read_hip, read_rocr, torch_count, torch_visible
from vime_devices.platforms import Platform
from vime_devices.topology import Device, Node


@dataclass(frozen=True, slots=True)
class Resolution:
    """An environment resolved against a node.

    Attributes:
        node: The devices below every mask.
        layers: The readings, from the lowest layer up.
        runtime: What the runtime will enumerate: position is ordinal. A promise only where nothing disagrees.
        torch: What torch counts before it initialises; None for an entry that does not exist. None as a whole where
            torch raises, or asks the runtime instead (MIG).
        disagreements: One line per place where readers differ or an outcome is not defined.
    """

    node: Node
    layers: tuple[Reading, ...]
    runtime: tuple[Device, ...]
    torch: tuple[Device | None, ...] | None
    disagreements: tuple[str, ...]

    def devices(self) -> tuple[Device, ...]:
        """Return the devices by ordinal.

        Raises:
            VisibilityError: Readers differ about this environment.
        """
        if self.disagreements:
            raise VisibilityError(
                "the environment has no single meaning",
                where=", ".join(f"{layer.reader.value} reads {layer.text!r}" for layer in self.layers),
                seen=" | ".join(self.disagreements),
                expected="one device list for every reader",
                fix="write masks with child_environment; see `vime-devices explain`",
            )
        return self.runtime


def resolve(environ: Mapping[str, str], node: Node, *, rocm: tuple[int, int] | None = None) -> Resolution:
    """Resolve an environment against a node.

    Args:
        environ: The environment.
        node: The devices below every mask; its platform says which rules hold.
        rocm: The ROCm release as (major, minor), for what older ones lack; by default a recent one.

    Returns:
        The resolution.

    Raises:
        PlatformError: The node belongs to the CPU platform, which has no masks.
    """
    if node.platform is Platform.CPU:
        raise PlatformError(
            "nothing to resolve on the CPU platform",
            where="resolve",
            seen="a node of the CPU platform",
            expected="a node of AMD or NVIDIA devices",
            fix="pass read_kfd(...), discover_node(Platform.HIP) or discover_node(Platform.CUDA)",
        )
    layers = _hip_layers(environ, node, rocm) if node.platform is Platform.HIP else _cuda_layers(environ, node)
    runtime = list(node.devices)
    for layer in layers:
        runtime = [runtime[index] for index in layer.indices]
    notes = [f"{layer.reader.value}: {layer.reason} (outcome not defined)" for layer in layers if not layer.defined]
    torch = _torch(environ, node, layers[0], notes)
    if torch is not None and [device and device.index for device in torch] != [device.index for device in runtime]:
        notes.append(f"torch counts {_show(torch)} before it initialises, the runtime has {_show(runtime)}")
    return Resolution(node, layers, tuple(runtime), torch, tuple(notes))


def _hip_layers(environ: Mapping[str, str], node: Node, rocm: tuple[int, int] | None) -> tuple[Reading, ...]:
    uuids = [device.uuid for device in node.devices]
    rocr = read_rocr(environ.get(variables.ROCR), uuids)
    handed_up = [uuids[index] for index in rocr.indices]
    text = hip_source(environ.get(variables.HIP), environ.get(variables.CUDA))
    return rocr, read_hip(text, handed_up) if rocm is None else read_hip(text, handed_up, rocm=rocm)


def _cuda_layers(environ: Mapping[str, str], node: Node) -> tuple[Reading, ...]:
    return (read_cuda(environ.get(variables.CUDA), [device.uuid for device in node.devices]),)


def _torch(
    environ: Mapping[str, str], node: Node, lowest: Reading, notes: list[str]
) -> tuple[Device | None, ...] | None:
    """Place torch's own count on the node; append to ``notes`` where torch raises."""
    hip_platform = node.platform is Platform.HIP
    try:
        visible = torch_visible(
            node.platform,
            rocr=environ.get(variables.ROCR),
            hip=environ.get(variables.HIP),
            cuda=environ.get(variables.CUDA),
        )
    except VisibilityError as error:
        notes.append(f"torch: {error.what} ({error.seen})")
        return None
    by_uuid = bool(visible) and isinstance(visible[0], str)
    if by_uuid and str(visible[0]).startswith("MIG-"):
        return None  # torch does not parse these: it asks the driver
    uuids = [device.uuid for device in node.devices if not device.uuid.startswith("MIG-")]
    ids = [uuid.removeprefix("GPU-").lower() for uuid in uuids] if hip_platform else uuids
    places = torch_count(node.platform, visible, ids)
    if not hip_platform or by_uuid:
        return tuple(node.devices[place] for place in places)
    # torch's ordinals count in what ROCr left, but torch caps them by amdsmi's count, which ROCr does not filter.
    left = lowest.indices
    return tuple(node.devices[left[place]] if place < len(left) else None for place in places)


def _show(devices: tuple[Device | None, ...] | list[Device]) -> str:
    names = ["none" if device is None else str(device.index) for device in devices]
    return f"{len(devices)} [{','.join(names)}]"
