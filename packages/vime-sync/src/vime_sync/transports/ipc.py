"""CUDA and HIP IPC: trainer and engine on one host, weights in device memory. A handle is opened once and never again.

The exporter sends one handle a storage, as JSON; nothing is unpickled. With it goes the *identity* of the device that
holds the memory, which is what makes the route safe: process ordinals mean nothing across masks. The importer compares
identities before it calls the runtime:

* the same device: the copy stays in one memory (``local``);
* another device of this host: the memory is mapped over the fabric (``peer``);
* anything else (another host, an id that nobody here knows, a pair without peer access): refused.

A handle carries the exporter's ordinal, and torch opens it on the ordinal that it is given. Measured on a node of two
H200 under every mask: it opens under any of them when the importer's *own* index replaces the exporter's, and only
where that ordinal exists otherwise. So it is always replaced. That gives the importing device access to the memory
(`cudaIpcMemLazyEnablePeerAccess`), and a kernel or a copy on that device then reads it wherever it lies. The HIP path
is the same code and is unconfirmed on hardware.

Memory of an expandable-segments pool is refused: its handles are file descriptors, opened page by page.

The memory belongs to the exporter for as long as its storage lives. The tensors that `IpcImporter.open` returns keep
the mapping; dropping the last of them closes it. torch counts one importer a handle and may see more (several workers,
a second session), so nothing here relies on that count: the publisher holds the storage until it is closed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from vime_devices import DeviceId, IdentityError, Relation, Source, identify, relation
from vime_devices.identity import fallback_id
from vime_devices.topology import boot_id

from vime_sync.errors import StaleSourceError, TransportError
from vime_sync.layout import DTYPES, dtype_name
from vime_sync.source import WeightSource
from vime_sync.striping import Place
from vime_sync.transports import BufferKey

#: What torch's `_share_cuda_` returns and `_new_shared_cuda` takes, in order. The types are exact on both sides:
#: torch 2.11 refuses an int where it wants a bool.
FIELDS: dict[str, type] = {
    "device": int,
    "handle": bytes,
    "size": int,
    "offset": int,
    "ref_counter": bytes,
    "ref_offset": int,
    "event": bytes,
    "event_sync": bool,
}
#: Bytes of a runtime's own handle. torch (2.5 and newer) writes a version byte and a kind byte before them; of an
#: expandable segment it writes a list of descriptors instead, which may be shorter or longer.
_RUNTIME_HANDLE = 64
_MALLOC = b"c"


def device_identity(index: int) -> DeviceId:
    """Identify a visible device by the runtime's own id, or by its address within this boot where it has none.

    Args:
        index: Ordinal within this process.
    """
    properties: Any = torch.cuda.get_device_properties(index)
    source = Source.TORCH_HIP if torch.version.hip else Source.TORCH_CUDA
    try:
        return identify(str(properties.uuid), source)
    except IdentityError:
        return fallback_id(
            boot_id(), f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )


def encode_handle(shared: tuple[Any, ...], device: DeviceId, host: str) -> dict[str, Any]:
    """Write a handle as JSON.

    Args:
        shared: What ``UntypedStorage._share_cuda_`` returned.
        device: Who holds the memory.
        host: The boot id of its host.

    Raises:
        TransportError: If the memory belongs to an expandable segment.
    """
    fields = dict(zip(FIELDS, shared, strict=True))
    handle = bytes(fields["handle"])
    if len(handle) != _RUNTIME_HANDLE and handle[1:2] != _MALLOC:
        raise TransportError(
            "memory of an expandable segment cannot be shared",
            where=str(device),
            seen=f"a handle of kind {handle[1:2]!r}, {len(handle)} bytes; PYTORCH_ALLOC_CONF has expandable_segments",
            expected=f"memory of cudaMalloc or hipMalloc, kind {_MALLOC!r}",
            fix="allocate the published buffers without expandable segments",
        )
    plain = {name: _plain(fields[name], kind) for name, kind in FIELDS.items()}
    identity = {"scheme": device.scheme, "unique": device.unique, "partition": device.partition}
    return {"identity": identity, "host": host, "fields": plain}


def decode_handle(record: Any, *, where: str) -> tuple[DeviceId, str, tuple[Any, ...]]:
    """Validate and read what `encode_handle` wrote.

    Args:
        record: Anything a peer sent.
        where: Which buffer, for errors.

    Returns:
        The device that holds the memory, its host, and the arguments of ``_new_shared_cuda``.

    Raises:
        TransportError: If anything has not the form it must have.
    """
    try:
        identity, fields, host = record["identity"], record["fields"], record["host"]
        partition = identity["partition"]
        device = DeviceId(identity["scheme"], identity["unique"], None if partition is None else _natural(partition))
        values = tuple(_exact(fields[name], kind) for name, kind in FIELDS.items())
    except (KeyError, TypeError, ValueError, binascii.Error) as cause:
        raise TransportError("malformed handle", where=where, seen=repr(cause)[:120]) from cause
    if not all(isinstance(text, str) for text in (host, device.scheme, device.unique)) or len(fields) != len(FIELDS):
        raise TransportError("malformed handle", where=where, seen=repr(record)[:120])
    return device, host, values


def _plain(value: Any, kind: type) -> Any:
    """A field as JSON."""
    return base64.b64encode(bytes(value)).decode("ascii") if kind is bytes else kind(value)


def _exact(value: Any, kind: type) -> Any:
    """A field as the type that torch wants."""
    if kind is bytes:
        return base64.b64decode(value, validate=True)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    return _natural(value)


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _share(storage: torch.UntypedStorage, where: str) -> tuple[Any, ...]:
    """Take a handle; the allocator may refuse (expandable segments, pluggable allocators)."""
    try:
        shared: tuple[Any, ...] = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as cause:
        raise TransportError(
            "the allocator does not share this memory",
            where=where,
            seen=(str(cause).splitlines() or [type(cause).__name__])[0],
            fix="allocate the published buffers by torch's own allocator, without expandable segments",
        ) from cause
    return shared


def route(own: DeviceId, theirs: DeviceId, host: str, *, peers: Mapping[DeviceId, bool], where: str) -> str:
    """Decide how a device reaches memory of another, before the runtime is asked.

    Args:
        own: The importing device.
        theirs: The device that holds the memory.
        host: The boot id of its host.
        peers: Other devices that this process sees, and whether the importing one can access them.
        where: For errors.

    Returns:
        ``"local"`` or ``"peer"``.

    Raises:
        TransportError: If it cannot.
    """
    if host != boot_id():
        raise TransportError(
            "a handle of another host",
            where=where,
            seen=f"boot {host}",
            expected=f"boot {boot_id()}",
            fix="use the collective or the disk transport between hosts",
        )
    found = relation(own, theirs)
    if found is Relation.SAME_DEVICE:
        return "local"
    if found is Relation.UNKNOWN:
        raise TransportError(
            "a handle's device cannot be compared with this one",
            where=where,
            seen=str(theirs),
            expected=f"an id like {own}",
            fix="compare both processes with `vime-devices explain`",
        )
    access = next((ok for device, ok in peers.items() if relation(device, theirs) is Relation.SAME_DEVICE), True)
    if not access:
        raise TransportError(
            "the device has no peer access to the memory",
            where=where,
            seen=f"{theirs}",
            expected=f"a peer of {own}",
            fix="use the collective transport between these devices",
        )
    return "peer"


class IpcExporter:
    """Trainer side; see the module's text."""

    def __init__(self, source: WeightSource) -> None:
        """Take a handle of every storage.

        Raises:
            TransportError: If a buffer is not device memory, or its memory cannot be shared.
        """
        self._records: dict[str, dict[str, Any]] = {}
        self._devices = sorted({buffer.device.index or 0 for buffer in source.buffers.values()})
        shared: dict[int, dict[str, Any]] = {}
        for name, buffer in source.buffers.items():
            if buffer.device.type != "cuda":
                raise TransportError(
                    "ipc carries device memory only",
                    where=f"rank {source.rank}, buffer {name}",
                    seen=str(buffer.device),
                    fix="use the shm transport for CPU memory",
                )
            storage = buffer.untyped_storage()
            if storage.data_ptr() not in shared:
                identity = device_identity(buffer.device.index or 0)
                shared[storage.data_ptr()] = encode_handle(_share(storage, str(identity)), identity, boot_id())
            self._records[name] = {
                "dtype": dtype_name(buffer.dtype),
                "numel": buffer.numel(),
                "handle": {
                    **shared[storage.data_ptr()],
                    "buffer_offset": int(buffer.storage_offset()) * buffer.element_size(),
                },
            }

    def records(self) -> dict[str, dict[str, Any]]:
        """Each buffer's dtype, numel and handle."""
        return self._records

    def flush(self) -> None:
        """Wait until the device has written what was queued."""
        for index in self._devices:
            torch.cuda.synchronize(index)

    def close(self) -> None:
        """Give back what importers have released."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class IpcImporter:
    """Engine side; see the module's text."""

    def __init__(self, sources: list[dict[str, Any]], needed: set[BufferKey], device: torch.device) -> None:
        """Remember what to open.

        Raises:
            TransportError: On a worker without a device.
        """
        if device.type != "cuda":
            raise TransportError(
                "ipc feeds device memory only", seen=str(device), fix="use the shm transport (push: --device cpu)"
            )
        self._sources, self._needed = sources, needed
        self._index = torch.cuda.current_device() if device.index is None else device.index
        #: How each buffer is reached: ``local`` or ``peer``.
        self.routes: dict[BufferKey, str] = {}

    def places(self) -> Mapping[BufferKey, Place]:
        """Where the buffers are, by the identities in their handles; what cannot be reached is left out.

        A buffer that is left out is still refused by name if it is needed.
        """
        own, peers = self._devices()
        found = {}
        for source in self._sources:
            for name, record in source["buffers"].items():
                key = (int(source["rank"]), str(name))
                where = f"trainer rank {key[0]}, buffer {name}"
                theirs, host, _ = decode_handle(record.get("handle"), where=where)
                with contextlib.suppress(TransportError):
                    found[key] = Place(theirs, route(own, theirs, host, peers=peers, where=where) == "local")
        return found

    def narrow(self, needed: set[BufferKey]) -> None:
        """Map these, and no others."""
        self._needed = needed

    def _devices(self) -> tuple[DeviceId, dict[DeviceId, bool]]:
        """This worker's device, and which of the others that it sees it can access."""
        peers = {
            device_identity(index): torch.cuda.can_device_access_peer(self._index, index)
            for index in range(torch.cuda.device_count())
            if index != self._index
        }
        return device_identity(self._index), peers

    def open(self) -> Mapping[BufferKey, torch.Tensor]:
        """Map the buffers.

        Raises:
            TransportError: If a handle is malformed or its device cannot be reached.
            StaleSourceError: If the runtime refuses it: the exporter has ended, or freed the memory.
        """
        own, peers = self._devices()
        buffers: dict[BufferKey, torch.Tensor] = {}
        opened: dict[tuple[Any, ...], torch.UntypedStorage] = {}
        for source in self._sources:
            for name, record in source["buffers"].items():
                key = (int(source["rank"]), str(name))
                if key not in self._needed:
                    continue
                where = f"trainer rank {key[0]}, buffer {name}"
                theirs, host, values = decode_handle(record.get("handle"), where=where)
                self.routes[key] = route(own, theirs, host, peers=peers, where=where)
                if values[1:4] not in opened:
                    opened[values[1:4]] = self._map(values, where)
                buffers[key] = _flat(opened[values[1:4]], record, where)
        return buffers

    def _map(self, values: tuple[Any, ...], where: str) -> torch.UntypedStorage:
        with torch.cuda.device(self._index):
            try:
                storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(self._index, *values[1:])
            except (RuntimeError, ValueError) as cause:
                raise StaleSourceError(
                    "the runtime does not open a handle",
                    where=where,
                    seen=(str(cause).splitlines() or [type(cause).__name__])[0],
                    expected="memory of a live trainer process of this user and container",
                    fix="publish again and connect again; `vime-devices probe` shows which masks work here",
                ) from cause
        return storage

    def fetch(self, version: int) -> None:
        """Nothing to do: the mapping is live."""

    def close(self) -> None:
        """Nothing to do: the mapping goes with the tensors."""


def _flat(storage: torch.UntypedStorage, record: dict[str, Any], where: str) -> torch.Tensor:
    """The buffer as a flat tensor over the mapped storage."""
    dtype, numel = DTYPES[record["dtype"]], int(record["numel"])
    offset = record["handle"].get("buffer_offset")
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0 or offset % dtype.itemsize:
        raise TransportError("malformed handle", where=where, seen=f"buffer_offset {offset!r}")
    if offset + numel * dtype.itemsize > storage.nbytes():
        raise TransportError(
            "a buffer reaches beyond its storage",
            where=where,
            seen=f"{offset + numel * dtype.itemsize} bytes",
            expected=f"at most {storage.nbytes()}",
        )
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, (numel,), (1,))
