"""The error family that every vime package builds on.

An error is worth its text only if a reader can act on it, so each one carries five fields: what happened, where (rank,
device, tensor, engine), what was seen, what was expected, and what to do about it. Programs read the fields; people
read ``str(error)``, which joins those that are set into one paragraph.
"""

from __future__ import annotations


class VimeError(Exception):
    """Base of every error that a vime package raises on purpose.

    Args:
        what: One clause that names the failure.
        where: The rank, device, tensor, file or engine it concerns.
        seen: The value or state that was found.
        expected: The value or state that would have been right.
        fix: The smallest change that mends it.
    """

    def __init__(self, what: str, *, where: str = "", seen: str = "", expected: str = "", fix: str = "") -> None:
        """Keep the fields and build the text."""
        self.what = what
        self.where = where
        self.seen = seen
        self.expected = expected
        self.fix = fix
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [f"{self.what} ({self.where})" if self.where else self.what]
        for label, value in (("seen", self.seen), ("expected", self.expected), ("fix", self.fix)):
            if value:
                parts.append(f"{label}: {value}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling with the keyword fields intact (errors cross process boundaries in Ray)."""
        fields = {"where": self.where, "seen": self.seen, "expected": self.expected, "fix": self.fix}
        return _rebuild, (type(self), self.what, fields)


class DeviceError(VimeError):
    """Base of the errors of vime-devices."""


class PlatformError(DeviceError):
    """The platform cannot be told, or the call makes no sense on it."""


class MaskError(DeviceError):
    """A mask, a device list or an offset that cannot be honoured as written."""


class VisibilityError(DeviceError):
    """The environment means different things to different readers, or nothing at all to one of them."""


class IdentityError(DeviceError):
    """A device id that is missing, shared by several devices, or not the one that was promised."""


class TopologyError(DeviceError):
    """The node's device tree is absent, malformed or unreadable."""


class ProbeError(DeviceError):
    """The IPC probe could not be carried out (its results are data, not errors)."""


def _rebuild(cls: type[VimeError], what: str, fields: dict[str, str]) -> VimeError:
    return cls(what, **fields)
