"""The two-process IPC probe on real devices."""

from vime_devices.probe.controller import Arm, Case, Outcome, ProbeOptions, ProbeResult, default_masks, run_probe
from vime_devices.probe.table import markdown

__all__ = ["Arm", "Case", "Outcome", "ProbeOptions", "ProbeResult", "default_masks", "markdown", "run_probe"]
