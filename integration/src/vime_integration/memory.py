"""Giving device memory back and forth between trainer and engines, with figures.

Colocated, the two sides need the device's memory at different times. Each side gives memory up for real, which only the
device's driver can tell: a framework's allocator may hold on to what it calls free. So every move is measured by the
driver's own count, and a move that does not return what it moved ends the run with the figures, because the other side
would run out of memory a moment later and be blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime_integration.errors import PipelineError

GIB = 2**30
#: Least share of the moved bytes that the driver must report as free afterwards.
RETURNED = 0.9
#: And what a framework's allocator may keep of it in half-used blocks, which counts with small models only.
SLACK_GIB = 0.25


def moved_metrics(kind: str, reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of one move of the trainer's state, and check it.

    Args:
        kind: "offload" or "onload".
        reports: One a rank: `vime_megatron`'s MoveReport as a dictionary, and ``kept_gib`` where room was made; empty
            where there was room enough.

    Returns:
        ``memory/<kind>_gib``, bytes that crossed or were dropped, over all ranks; and on a GPU
        ``memory/<kind>_device_gib``, the change of free device memory as the driver reports it, and
        ``memory/trainer_kept_gib``, what the fullest rank's allocator holds after making room. Nothing where no rank
        had to make any.

    Raises:
        PipelineError: An offload returned less device memory than it moved; names rank and figures.
    """
    if not any(reports):
        return {}
    moved = [int(report.get("bytes_copied", 0)) + int(report.get("bytes_dropped", 0)) for report in reports]
    device = [int(report.get("device_bytes", 0)) for report in reports]
    if any(device) and kind == "offload":
        for rank, (expected, seen) in enumerate(zip(moved, device, strict=True)):
            _check_returned(f"trainer-{rank}", expected / GIB, seen / GIB)
    metrics = {f"memory/{kind}_gib": sum(moved) / GIB}
    if kept := max(report.get("kept_gib", 0.0) for report in reports):
        metrics["memory/trainer_kept_gib"] = kept
    return metrics | ({f"memory/{kind}_device_gib": sum(device) / GIB} if any(device) else {})


def slept_metrics(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what engines gave back by falling asleep, as the trainer ranks on their devices see it.

    Args:
        before: Each rank's memory report before, with ``device_free_gib``.
        after: Likewise after.

    Returns:
        ``memory/engines_slept_gib``, over all devices; empty where there is no device to ask.

    Raises:
        PipelineError: A device has no more free memory than before: the engine on it kept what it had.
    """
    key = "device_free_gib"
    if not all(key in report for report in (*before, *after)):
        return {}
    freed = [late[key] - early[key] for early, late in zip(before, after, strict=True)]
    for rank, gib in enumerate(freed):
        if gib <= 0:
            raise PipelineError(
                "an engine went to sleep and kept its memory",
                where=f"the device of trainer-{rank}",
                seen=f"{gib:+.2f} GiB free",
                expected="more free memory than before",
                fix='set engine.sleep = "off" and give each side its share (engine.gpu_memory_utilization)',
            )
    return {"memory/engines_slept_gib": sum(freed)}


def _check_returned(where: str, expected_gib: float, seen_gib: float) -> None:
    least = RETURNED * expected_gib - SLACK_GIB
    if seen_gib < least:
        raise PipelineError(
            "device memory was not returned",
            where=where,
            seen=f"{seen_gib:.2f} GiB more free on the device",
            expected=f"at least {least:.2f} GiB, of {expected_gib:.2f} GiB moved",
            fix='set trainer.offload = "off", or find what holds memory in that process',
        )
