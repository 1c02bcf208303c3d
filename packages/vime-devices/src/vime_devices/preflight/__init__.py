"""What a process sees, published; and whether two processes can exchange memory, decided before they try.

Each process calls ``take_snapshot`` and sends the result (``to_json``) to whoever decides; ``check_all`` reads them.
"""

from vime_devices.preflight.findings import Finding, Severity
from vime_devices.preflight.mending import mend
from vime_devices.preflight.pair_checks import check_all, check_pair
from vime_devices.preflight.process_checks import check_process
from vime_devices.preflight.snapshot import SeenDevice, Snapshot, take_snapshot

__all__ = [
    "Finding",
    "SeenDevice",
    "Severity",
    "Snapshot",
    "check_all",
    "check_pair",
    "check_process",
    "mend",
    "take_snapshot",
]
