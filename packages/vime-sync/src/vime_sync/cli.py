"""The command ``vime-sync``: push a checkpoint into a running engine, compare one with it, measure a transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vime_sync.bench import SHAPES, TRANSPORTS, run_bench, shape_of_size
from vime_sync.errors import SyncError, TransactionError, TransportError
from vime_sync.publisher import Publisher
from vime_sync.session import SyncSession
from vime_sync.source import WeightSource
from vime_sync.verify import Comparison, compare

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Checkpoint = Annotated[
    Path, typer.Argument(help="Folder of a HF checkpoint (safetensors).", exists=True, file_okay=False)
]
Servers = Annotated[list[str], typer.Option("--server", help="Base URL of a vLLM server; repeat for several.")]
Deadline = Annotated[float, typer.Option(help="Seconds that any one request may take.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def push(
    checkpoint: Checkpoint,
    server: Servers,
    version: Annotated[
        int | None, typer.Option(help="Version to commit; by default one more than any engine serves.")
    ] = None,
    mode: Annotated[str, typer.Option(help="auto, shadow, undo or direct.")] = "auto",
    takeover: Annotated[bool, typer.Option(help="Replace the trainer that is connected.")] = False,
    device: Annotated[
        str,
        typer.Option(help="Where CHECKPOINT is held meanwhile: cpu for engines on CPUs, cuda:N for engines on GPUs."),
    ] = "auto",
    deadline_s: Deadline = 300.0,
    as_json: AsJson = False,
) -> None:
    """Load CHECKPOINT into running engines on this host, all of them or none."""
    with _published(checkpoint, _device(device)) as publisher:
        session = SyncSession(server, publisher.manifest(), deadline_s=deadline_s, mode=mode, takeover=takeover)
        with session:
            chosen = max(session.versions()) + 1 if version is None else version
            publisher.stage(max(chosen, 0))
            report = session.update(max(chosen, 0))
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    typer.echo(
        f"{report.engines} engines serve version {report.version} "
        f"({report.bytes / 1e6:.1f} MB in {report.seconds:.3f} s, mode {report.mode}, digest {report.digest})"
    )


def _device(asked: str) -> torch.device:
    """The device that was asked for; ``auto`` is a GPU where there is one.

    Raises:
        TransportError: If there is none such.
    """
    count = torch.cuda.device_count()
    if asked == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as cause:
        raise TransportError("unknown device", seen=asked, expected="auto, cpu or cuda:N") from cause
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= count):
        raise TransportError("there is no such device here", seen=asked, expected=f"cpu, or one of {count} GPUs")
    return device


def _published(checkpoint: Path, device: torch.device) -> Publisher:
    """A checkpoint that engines can read from a device of this host.

    Raises:
        TransportError: If it does not fit there.
    """
    try:
        source = WeightSource.from_safetensors(checkpoint, device=device)
    except torch.OutOfMemoryError as cause:
        raise TransportError(
            "the checkpoint does not fit beside what is on the device",
            where=str(device),
            seen=str(cause).splitlines()[0],
            fix="give another GPU that the engines' can reach, with --device cuda:N",
        ) from cause
    return Publisher(source, "ipc" if device.type == "cuda" else "shm")


@app.command()
def verify(checkpoint: Checkpoint, server: Servers, deadline_s: Deadline = 300.0, as_json: AsJson = False) -> None:
    """Compare what engines serve now with CHECKPOINT, byte for byte; exit status 1 if they differ."""
    source = WeightSource.from_safetensors(checkpoint)
    found = [compare(url, source, deadline_s=deadline_s) for url in server]
    if as_json:
        typer.echo(json.dumps([_record(item) for item in found]))
    for item in found if not as_json else ():
        state = "equal" if item.equal else "DIFFERENT"
        typer.echo(
            f"{item.url}: {state}, version {item.version}, {len(item.matching)} tensors match, "
            f"{len(item.differing)} differ, {len(item.unread)} not held whole"
        )
        for name in item.differing[:10]:
            typer.echo(f"  differs: {name}")
    if not all(item.equal for item in found):
        raise typer.Exit(1)


def _record(item: Comparison) -> dict[str, Any]:
    return {
        "url": item.url,
        "equal": item.equal,
        "version": item.version,
        "digest": item.digest,
        "matching": len(item.matching),
        "differing": list(item.differing),
        "unread": list(item.unread),
    }


@app.command()
def bench(
    transport: Annotated[str, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = "shm",
    mode: Annotated[str, typer.Option(help="copy or alias.")] = "copy",
    model_shape: Annotated[str | None, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = None,
    size_mb: Annotated[
        int | None, typer.Option(min=1, help="Instead of a shape: about so many MB (default 256).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed updates, after one that warms up.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure a transport between two processes of this host, with the real transaction and full digests."""
    if model_shape is not None and (model_shape not in SHAPES or size_mb is not None):
        raise TransactionError(
            "give a known shape, or a size", seen=f"{model_shape}, {size_mb}", expected=", ".join(SHAPES)
        )
    shape = SHAPES[model_shape] if model_shape is not None else shape_of_size(size_mb or 256)
    result = run_bench(transport, mode=mode, shape=shape, rounds=rounds)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
        return
    middle = sorted(result.seconds)[len(result.seconds) // 2]
    typer.echo(
        f"{result.transport} ({result.mode}, {result.device}): {result.bytes / 1e6:.1f} MB in {middle * 1e3:.2f} ms, "
        f"{result.gb_per_s:.2f} GB/s, digest {'equal' if result.digest_ok else 'DIFFERENT'}"
    )


def main() -> None:
    """Entry point: a refusal is one paragraph on standard error and exit status 1."""
    try:
        app()
    except SyncError as error:
        typer.echo(f"vime-sync: {type(error).__name__}: {error}", err=True)
        sys.exit(1)
