"""The command: every stage in turn, then the manifest and the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from vime_devices import Platform, VimeError
from vime_grpo import ConfigError

from vime_integration.accept.page import write_page
from vime_integration.accept.provenance import describe
from vime_integration.accept.record import PLATFORMS, Acceptance, Outcome, PlatformName, Report, StageResult
from vime_integration.accept.runs import usable_gpus
from vime_integration.accept.supervise import Stage, ending_with_sigterm, run_stage

SCHEMA = 1
EXIT_FAILED = 4
_HERE = "vime_integration.accept"

STAGES: tuple[Stage, ...] = (
    Stage("doctor", f"{_HERE}.stage_host:doctor", 300.0, "host, devices, packages and the run's configuration"),
    Stage("mask_ab", f"{_HERE}.stage_masks:mask_ab", 900.0, "the reference fault, without and with the cure"),
    Stage("ipc_probe", f"{_HERE}.stage_masks:ipc_probe", 1800.0, "memory of every GPU under every mask"),
    Stage("sync_bench", f"{_HERE}.stage_sync:sync_bench", 900.0, "weights between two processes, digests compared"),
    Stage("grpo_colocated", f"{_HERE}.stage_runs:grpo_colocated", 3600.0, "GRPO, engines and trainer sharing devices"),
    Stage("grpo_async", f"{_HERE}.stage_runs:grpo_async", 3600.0, "GRPO, engines and trainer at the same time"),
    Stage("logprob_difference", f"{_HERE}.stage_runs:logprob_difference", 120.0, "trainer and engine, token by token"),
    Stage("throughput", f"{_HERE}.stage_runs:throughput", 120.0, "tokens and seconds of these runs"),
)


def run_accept(
    platform: str, gpus: int, out: Path, *, steps: int = 20, sync_mb: int = 0, only: Iterable[str] | None = None
) -> int:
    """Accept this machine.

    Args:
        platform: ``rocm``, ``cuda`` or ``cpu``.
        gpus: How many GPUs the runs use; 0 for all that are visible.
        out: Folder of manifest, page, logs and runs; made when it does not exist.
        steps: Steps of each GRPO run.
        sync_mb: Megabytes of the sync bench; 0 takes the shape of Qwen3-8B on a GPU, 256 MB on a CPU.
        only: Names of the stages to make; None for all. The others stand as skipped.

    Returns:
        0, or 4 where a stage failed.

    Raises:
        ConfigError: There is no such platform or stage, or the folder holds an acceptance already.
    """
    acceptance = _asked(platform, gpus, out, steps, sync_mb)
    chosen = _chosen(only)
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "platform": platform,
        "gpus": _count(acceptance),
        "steps": steps,
        "started": _now(),
        "finished": None,
        "passed": None,
        "about": _about(acceptance),
        "stages": [],
    }
    failed: list[str] = []
    for stage in STAGES:
        _say(f"{stage.name}: {stage.title} ...")
        with ending_with_sigterm():
            result = run_stage(stage, acceptance) if stage.name in chosen else _left_out(stage)
        failed += [stage.name] if result.outcome is Outcome.FAIL else []
        manifest["stages"].append(result.to_json() | {"title": stage.title})
        _write(out, manifest)  # now: a machine that goes down in a later stage takes no result with it
        _say(f"{stage.name}: {result.outcome.value} after {result.seconds:.1f} s {result.reason}".rstrip())
    manifest |= {"finished": _now(), "passed": not failed}
    _write(out, manifest)
    (out / "page.md").write_text(write_page(manifest), encoding="utf-8")
    verdict = f"FAILED ({', '.join(failed)})" if failed else "passed"
    _say(f"{verdict}: {out / 'manifest.json'}, {out / 'page.md'}")
    return EXIT_FAILED if failed else 0


def _write(out: Path, manifest: dict[str, Any]) -> None:
    partial = out / "manifest.partial"
    partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.rename(out / "manifest.json")


def _about(acceptance: Acceptance) -> dict[str, Any]:
    """Describe the machine; a machine that cannot be described must not cost the results of an hour."""
    try:
        return describe(acceptance.devices)
    except Exception as error:  # noqa: BLE001 - the edge; the cause stands in the manifest
        _say(f"this machine cannot be described: {error}")
        nothing: dict[str, Any] = {"host": {}, "devices": [], "runtime": {}, "packages": {}, "commits": {}}
        return nothing | {"host": {"error": f"{type(error).__name__}: {error}"}}


def _asked(platform: str, gpus: int, out: Path, steps: int, sync_mb: int) -> Acceptance:
    if platform not in PLATFORMS:
        raise ConfigError("no such platform", where="--platform", seen=platform, expected=", ".join(PLATFORMS))
    if gpus < 0 or steps < 1 or sync_mb < 0:
        raise ConfigError(
            "not a count", seen=f"gpus {gpus}, steps {steps}, sync_mb {sync_mb}", expected="0 or more; steps 1 or more"
        )
    if (out / "manifest.json").exists():
        raise ConfigError(
            "this folder holds an acceptance already",
            where=str(out),
            seen="manifest.json",
            expected="a folder of its own for each acceptance",
            fix="choose another folder, or move that one away",
        )
    return Acceptance(cast("PlatformName", platform), gpus, out.absolute(), steps, sync_mb)


def _chosen(only: Iterable[str] | None) -> set[str]:
    names = [stage.name for stage in STAGES]
    chosen = set(names if only is None else only)
    if unknown := sorted(chosen - set(names)):
        raise ConfigError("no such stage", seen=", ".join(unknown), expected=", ".join(names))
    return chosen


def _left_out(stage: Stage) -> StageResult:
    return StageResult(stage.name, Outcome.SKIP, 0.0, "left out by the caller", Report(), "")


def _count(acceptance: Acceptance) -> int:
    """Count the GPUs of the runs; what cannot be listed was said by the doctor's stage."""
    if acceptance.devices is Platform.CPU:
        return 0
    try:
        return usable_gpus(acceptance)
    except VimeError:
        return 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
