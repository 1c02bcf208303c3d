"""What a check has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is: an error will fail the job, a warning may, a note explains."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is or may be wrong.

    Attributes:
        code: A stable name.
        severity: How bad it is.
        message: What was seen, with the values.
        symptom: What a user would otherwise meet, in the words of the library that fails.
        fix: The smallest change that mends it.
        where: The process, or the pair of them.
    """

    code: str
    severity: Severity
    message: str
    symptom: str
    fix: str
    where: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return {name: str(value) for name, value in asdict(self).items()}
