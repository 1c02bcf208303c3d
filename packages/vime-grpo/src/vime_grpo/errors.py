"""The errors of vime-grpo: one small family with fields that programs read and a text that people read.

The base is the twin of the one in vime-devices: the same five fields, so that the launcher prints the errors of every
package alike, without a dependency between the two.
"""

from __future__ import annotations


class GrpoError(Exception):
    """Base of every error that vime-grpo raises on purpose.

    Args:
        what: One clause that names the failure.
        where: The file, section, field or step it concerns.
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
        labelled = (("seen", self.seen), ("expected", self.expected), ("fix", self.fix))
        return "; ".join(parts + [f"{label}: {value}" for label, value in labelled if value])

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling with the fields intact: errors cross process boundaries."""
        fields = {"where": self.where, "seen": self.seen, "expected": self.expected, "fix": self.fix}
        return _rebuild, (type(self), self.what, fields)


class ConfigError(GrpoError):
    """A configuration file, an override or a combination of settings is wrong."""


class BatchError(GrpoError):
    """Samples cannot be made into a training batch (lengths differ, nothing to train on, values not finite)."""


class MetricsError(GrpoError):
    """The metrics file cannot be written or does not fit the step that is to be continued."""


class TrackerError(GrpoError):
    """A tracker (TensorBoard, Weights & Biases) is not installed or cannot begin."""


class ReportError(GrpoError):
    """A run folder cannot be made into a report."""


class LaunchError(GrpoError):
    """The pipeline or command that was asked for is not installed or cannot be loaded."""


def _rebuild(cls: type[GrpoError], what: str, fields: dict[str, str]) -> GrpoError:
    return cls(what, **fields)
