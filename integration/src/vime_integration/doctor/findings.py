"""What a check has to say: one line with what was seen, what was expected and what to do.

A check is a function that yields `Check`s. It may raise a `VimeError` or an `OSError`: `guarded` turns either into a
failed check under the group's name, so that one check that cannot be made never hides the ones after it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check came out: it holds, it may cost something, the run would fail, or it could not be made here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Group and name, such as ``host.shm``.
        status: How it came out.
        seen: What was found.
        expected: What would have been right.
        fix: The smallest change that mends it; empty where nothing is wrong.
    """

    name: str
    status: Status
    seen: str
    expected: str = ""
    fix: str = ""

    def line(self) -> str:
        """Return the check as one line of text."""
        text = f"{self.status.value:<4}  {self.name:<24}  {self.seen}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix and self.status in (Status.WARN, Status.FAIL):
            text += f"; fix: {self.fix}"
        return " ".join(text.splitlines())

    def to_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return {name: str(value) for name, value in asdict(self).items()}


def at_least(
    name: str, value: float, *, fails_below: float, warns_below: float, show: Callable[[float], str], fix: str
) -> Check:
    """Judge an amount by two limits.

    Args:
        name: The check.
        value: What was found.
        fails_below: Less than this cannot work.
        warns_below: Less than this works for small runs only.
        show: Writes an amount with its unit.
        fix: What raises it.
    """
    status = Status.FAIL if value < fails_below else Status.WARN if value < warns_below else Status.OK
    return Check(name, status, show(value), f"at least {show(warns_below)}", fix)


def guarded(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Run a group of checks; whatever it raises becomes a failed check.

    Args:
        name: The group, for a check that broke.
        checks: The group.

    Yields:
        Its checks, then the failure if there was one.
    """
    try:
        yield from checks()
    except Exception as error:  # noqa: BLE001 - the edge: a check that breaks must not hide the others; the cause is kept
        fields = {name: str(getattr(error, name, "")) for name in ("what", "where", "seen", "expected", "fix")}
        if fields["what"]:
            place = f" ({fields['where']})" if fields["where"] else ""
            seen = f": {fields['seen']}" if fields["seen"] else ""
            yield Check(name, Status.FAIL, f"{fields['what']}{place}{seen}", fields["expected"], fields["fix"])
            return
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        yield Check(name, Status.FAIL, f"{type(error).__name__}: {error}", "an answer", f"see {where}")


def worst(checks: Iterable[Check]) -> Status:
    """Return the gravest status among checks; ``ok`` where there are none."""
    order = (Status.FAIL, Status.WARN, Status.SKIP, Status.OK)
    found = {check.status for check in checks}
    return next((status for status in order if status in found), Status.OK)


def size(amount: float) -> str:
    """Write bytes in GiB, or in MiB where that says more."""
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"
