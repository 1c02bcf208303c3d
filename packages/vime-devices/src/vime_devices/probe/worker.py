"""The two ends of the IPC probe, each a process of its own. The only module of the package that imports torch.

Both speak JSON, one object a line, on the standard streams; handles travel as base64 text, so nothing is unpickled.
The exporter holds its tensors until it is told to stop. The importer is told a handle and the ordinal to open it on,
never the nonce: it reports a digest of what it read, and the controller compares.

torch's own calls are used (``_share_cuda_`` and ``_new_shared_cuda``, which ``reduce_tensor`` and
``rebuild_cuda_tensor`` wrap), because they are what a sync of weights goes through.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import sys
from typing import Any, TextIO

FIELDS = ("device", "handle", "size", "offset", "ref_counter", "ref_offset", "event", "event_sync")
_BYTES = ("handle", "ref_counter", "event")
NONCE_BYTES = 32


def main(arguments: list[str]) -> int:
    """Run one end: ``export`` or ``import``.

    Args:
        arguments: The command line without the program.

    Returns:
        The exit status.
    """
    # Libraries may print to stdout; keep a private copy of it for the protocol and send everything else to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        ready = _ready()
    except (ImportError, OSError, RuntimeError) as error:  # no torch, no driver, or a mask that the runtime refuses
        _say(out, event="error", text=f"{type(error).__name__}: {error}")
        return 1
    _say(out, event="ready", **ready)
    serve = _export if arguments == ["export"] else _import
    for line in sys.stdin:  # until the controller closes it
        serve(json.loads(line), out)
    return 0


def encode(shared: tuple[Any, ...]) -> dict[str, Any]:
    """Turn the tuple of ``_share_cuda_`` into JSON values.

    Args:
        shared: The tuple: device ordinal, handle, size and offset in bytes, reference counter, event.

    Returns:
        The fields by name, bytes as base64.
    """
    fields = dict(zip(FIELDS, shared, strict=True))
    return {k: base64.b64encode(v).decode("ascii") if k in _BYTES else v for k, v in fields.items()}


def decode(fields: dict[str, Any]) -> tuple[Any, ...]:
    """Turn the JSON values back into the arguments of ``_new_shared_cuda``.

    Args:
        fields: From ``encode``.

    Returns:
        The tuple, in order.
    """
    return tuple(base64.b64decode(fields[name]) if name in _BYTES else fields[name] for name in FIELDS)


def _ready() -> dict[str, Any]:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    devices = []
    for ordinal in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(ordinal)
        devices.append({"ordinal": ordinal, "uuid": str(properties.uuid), "name": properties.name})
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {"devices": devices, "torch": torch.__version__, "runtime": runtime, "pid": os.getpid()}


_exported: list[Any] = []  # tensors whose memory others may still read; freed with the process


def _export(request: dict[str, Any], out: TextIO) -> None:
    """Fill memory on one device with a nonce and send its handle."""
    import torch

    ordinal, nonce, size = request["ordinal"], bytes.fromhex(request["nonce"]), request["size"]
    try:
        host = torch.frombuffer(bytearray(nonce * (size // len(nonce))), dtype=torch.uint8)
        tensor = host.to(f"cuda:{ordinal}")
        torch.cuda.synchronize(ordinal)
        shared = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        _say(out, event="refused", number=request["number"], text=_first_line(error))
        return
    _exported.append(tensor)
    _say(out, event="exported", number=request["number"], handle=encode(shared))


def _import(request: dict[str, Any], out: TextIO) -> None:
    """Open a handle on the ordinal asked for (None: the exporter's) and digest what is there."""
    import torch

    handle = dict(request["handle"])
    if request["ordinal"] is not None:
        handle["device"] = request["ordinal"]
    try:
        torch.cuda.set_device(0)  # the importer's own device: masks put own devices first
        storage = torch.UntypedStorage._new_shared_cuda(*decode(handle))
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        host = tensor.cpu().contiguous()
    except (RuntimeError, AssertionError, IndexError, ValueError) as error:  # how torch says no differs by version
        _say(out, event="refused", text=_first_line(error))
        return
    data = ctypes.string_at(host.data_ptr(), host.numel())
    digest = hashlib.sha256(data).hexdigest()
    _say(out, event="opened", ordinal=tensor.device.index, sha256=digest, head=data[:NONCE_BYTES].hex())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _say(out: TextIO, **message: Any) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":  # pragma: no cover - run as a process
    sys.exit(main(sys.argv[1:]))
