"""What one reader made of one mask text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reader(StrEnum):
    """A piece of software that reads a mask."""

    ROCR = "rocr"
    HIP = "hip"
    TORCH = "torch"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Reading:
    """The devices that one reader takes from one text.

    Attributes:
        reader: Who read it.
        text: What was read; None for an unset variable.
        indices: Positions in the list of the layer beneath, in the order in which this layer hands them on.
        reason: Why the list is shorter than the text suggests; empty where every token counted.
        defined: False where the outcome is a crash, an undocumented corner, or differs between releases. ``indices``
            then holds the likeliest outcome and must not be relied on.
    """

    reader: Reader
    text: str | None
    indices: tuple[int, ...]
    reason: str = ""
    defined: bool = True


def read_all(reader: Reader, count: int) -> Reading:
    """Return the reading of an unset variable: every device of the layer beneath, in its order."""
    return Reading(reader, None, tuple(range(count)))
