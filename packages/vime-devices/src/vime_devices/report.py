"""Resolutions and findings as JSON values and as text that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vime_devices.preflight import Finding, Snapshot
from vime_devices.resolve import Resolution
from vime_devices.topology import Device


def explain_json(resolution: Resolution, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a resolution and the findings of its process as JSON values."""
    torch = resolution.torch
    return {
        "platform": resolution.node.platform.value,
        "node": _devices(resolution.node.devices),
        "assumed": resolution.node.assumed,
        "notes": list(resolution.node.notes),
        "layers": [
            {
                "reader": layer.reader.value,
                "text": layer.text,
                "indices": list(layer.indices),
                "reason": layer.reason,
                "defined": layer.defined,
            }
            for layer in resolution.layers
        ],
        "devices": _devices(resolution.runtime),
        "torch": None if torch is None else [device.index if device else None for device in torch],
        "disagreements": list(resolution.disagreements),
        "findings": [finding.to_json() for finding in findings],
    }


def explain_text(resolution: Resolution, findings: Sequence[Finding]) -> str:
    """Return the same as tables: one row per layer, then one per device."""
    node = resolution.node
    rows = [("layer", "reads", "leaves", "why")]
    source = "assumed" if node.assumed else "driver"
    rows.append((node.platform.value + " node", source, f"{len(node.devices)} devices", "; ".join(node.notes)))
    for layer in resolution.layers:
        kept = ",".join(map(str, layer.indices)) or "none"
        text = "unset" if layer.text is None else repr(layer.text)
        rows.append((layer.reader.value, text, f"{len(layer.indices)} [{kept}]", layer.reason))
    torch = resolution.torch
    counted = "asks the runtime" if torch is None else f"{len(torch)} devices"
    rows.append(("torch", "before init", counted, ""))
    devices = [("ordinal", "physical", "id", "address", "part", "kind")]
    for ordinal, device in enumerate(resolution.runtime):
        part = device.mode + ("" if device.partition is None else f" p{device.partition}")
        devices.append((str(ordinal), str(device.index), str(device.id), device.bdf, part, device.arch))
    parts = [_table(rows), _table(devices)]
    if resolution.disagreements:
        parts.append("Readers disagree:\n" + "\n".join(f"  {line}" for line in resolution.disagreements))
    return "\n\n".join([*parts, findings_text(findings)])


def doctor_json(snapshots: Sequence[Snapshot], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return snapshots and findings as JSON values; ``devices`` are those of the first process."""
    return {
        "devices": [
            {"ordinal": d.ordinal, "id": d.id, "physical": d.physical, "uuid": d.uuid, "bdf": d.bdf}
            for d in (snapshots[0].devices if snapshots else ())
        ],
        "findings": [finding.to_json() for finding in findings],
        "snapshots": [snapshot.to_json() for snapshot in snapshots],
    }


def doctor_text(snapshots: Sequence[Snapshot], findings: Sequence[Finding]) -> str:
    """Return one row per process and the findings."""
    rows = [("process", "platform", "devices (physical)", "ipc mode", "runtime")]
    for snapshot in snapshots:
        seen = ",".join(str(device.physical) for device in snapshot.devices) or "none"
        rows.append((snapshot.name, snapshot.platform, seen, snapshot.ipc_mode, snapshot.runtime_version or "unknown"))
    return (_table(rows) + "\n\n" if snapshots else "") + findings_text(findings)


def findings_text(findings: Sequence[Finding]) -> str:
    """Return each finding in three lines: what, what it looks like otherwise, and the change that mends it."""
    if not findings:
        return "No findings."
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity.value.upper()} {finding.code} ({finding.where}): {finding.message}")
        lines.append(f"    otherwise: {finding.symptom}")
        lines.append(f"    fix: {finding.fix}")
    return "\n".join(lines)


def _devices(devices: Iterable[Device]) -> list[dict[str, Any]]:
    return [
        {
            "ordinal": ordinal,
            "id": str(device.id),
            "physical": device.index,
            "uuid": device.uuid,
            "bdf": device.bdf,
            "socket": device.socket,
            "partition": device.partition,
            "mode": device.mode,
            "arch": device.arch,
        }
        for ordinal, device in enumerate(devices)
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
