"""What the rules about one process have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime_devices import variables
from vime_devices.preflight.findings import Finding, Severity
from vime_devices.preflight.snapshot import Snapshot

Rule = Callable[[Snapshot], Iterator[Finding]]


def finding(snapshot: Snapshot, code: str, severity: Severity, message: str, symptom: str, fix: str) -> Finding:
    """Make a finding about one process."""
    return Finding(code, severity, message, symptom, fix, snapshot.name)


def masks(snapshot: Snapshot) -> tuple[str | None, str | None, str | None]:
    """Return the ROCr, HIP and CUDA masks."""
    environ = snapshot.environ
    return environ.get(variables.ROCR), environ.get(variables.HIP), environ.get(variables.CUDA)
