"""What a session says of an update, and what it remembers of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SyncReport:
    """What one update did.

    Attributes:
        version: The version that every engine serves now.
        seconds: Wall time of the whole call.
        phases: Seconds by phase, the slowest engine's: ``stage``, ``pause``, ``open`` (aliased weights), ``commit``,
            ``copy`` (the bytes alone, digest included), ``publish``, ``resume``, and ``paused``, which goes from the
            request to pause to the end of resume.
        bytes: Bytes copied, over all engines.
        digest: The digest of what the engines serve (32 hexadecimal digits), empty if digests are off.
        digest_mode: ``off``, ``sampled`` or ``full``.
        mode: ``shadow``, ``undo``, ``direct`` or ``alias``.
        transport: The manifest's transport.
        engines: How many engines were updated.
        reload: Live tensors that were not copied but loaded again by the engine's own means, each with the reason.
    """

    version: int
    seconds: float
    phases: Mapping[str, float]
    bytes: int
    digest: str
    digest_mode: str
    mode: str
    transport: str
    engines: int
    reload: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Served:
    """What the engines were last brought to.

    Attributes:
        version: -1 before the first commit.
        digest: Of its bytes; empty if digests are off.
        mode: ``off``, ``sampled`` or ``full``.
    """

    version: int = -1
    digest: str = ""
    mode: str = "off"

    @classmethod
    def of(cls, report: SyncReport) -> Served:
        """What an update did."""
        return cls(report.version, report.digest, report.digest_mode)


@dataclass
class Writing:
    """What `SyncSession.writing` yields.

    Attributes:
        report: The update's report; None until the block has ended.
    """

    report: SyncReport | None = None
