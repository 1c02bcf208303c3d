"""How the CUDA driver reads ``CUDA_VISIBLE_DEVICES`` (once, at ``cuInit``).

The driver is closed. What is encoded here is NVIDIA's documentation (an invalid index hides itself and everything
after it; a UUID may be cut to a unique prefix; kinds may not be mixed) and what torch's own reader says of it (a
number is what the token starts with). Outcomes that neither states are marked not ``defined``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vime_devices.parsers.reading import Reader, Reading, read_all

_NUMBER = re.compile(r"[+-]?[0-9]+")


def read_cuda(text: str | None, uuids: Sequence[str]) -> Reading:
    """Read the mask as the CUDA driver does.

    Args:
        text: The variable, or None where it is unset.
        uuids: The node's GPUs in the driver's order (``GPU-<uuid>``), then its MIG devices (``MIG-<uuid>``).

    Returns:
        Positions in ``uuids``.
    """
    gpus = sum(1 for uuid in uuids if not uuid.startswith("MIG-"))
    if text is None:
        return read_all(Reader.CUDA, gpus)
    if text == "":
        return Reading(Reader.CUDA, text, (), "an empty list hides every device")
    kind = _kind(text.split(",")[0].strip())
    chosen: list[int] = []
    all_defined = True
    for raw in text.split(","):
        token = raw.strip()
        if token and _kind(token) != kind:
            return Reading(Reader.CUDA, text, tuple(chosen), f"{token!r} mixes kinds of selector", defined=False)
        index, reason, defined = _uuid(token, uuids) if kind else _number(token, gpus)
        all_defined = all_defined and defined
        if index is None:
            return Reading(Reader.CUDA, text, tuple(chosen), reason, defined=all_defined)
        if index in chosen:
            return Reading(Reader.CUDA, text, (), f"{token!r} names device {index} again: none is left", all_defined)
        chosen.append(index)
    return Reading(Reader.CUDA, text, tuple(chosen), "" if all_defined else "text after a number", all_defined)


def _kind(token: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if token.startswith(prefix)), "")


def _number(token: str, count: int) -> tuple[int | None, str, bool]:
    match = _NUMBER.match(token)
    if match is None:
        return None, f"{token!r} is no number and ends the list", True
    index = int(match.group())
    if not 0 <= index < count:
        return None, f"{token!r} is outside 0..{count - 1} and ends the list", True
    # '0x1' is 0 to strtol with base 10 and 1 with base 0; which one the driver uses is not documented.
    return index, "text after the number", match.end() == len(token)


def _uuid(token: str, uuids: Sequence[str]) -> tuple[int | None, str, bool]:
    found = [i for i, uuid in enumerate(uuids) if token and uuid.startswith(token)]
    if len(found) != 1:
        return None, f"{token!r} names {len(found)} devices and ends the list", True
    return found[0], "", True
