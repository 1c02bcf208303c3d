"""How ROCr reads ``ROCR_VISIBLE_DEVICES`` (once, at ``hsa_init``).

Source: the visible-device filter of ROCR-Runtime, read at ROCm 6.3; not confirmed on hardware. Tokens are trimmed. A
token that starts with ``G`` is a UUID prefix of 5 to 20 characters, compared without case; it must name exactly one
device, and ``GPU-XX`` (no id) names none. Any other token goes through ``strtol`` with base 0. The first token that
names nothing, or a device named before, ends the list; what came earlier is kept. An empty token is read out of bounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vime_devices.parsers.reading import Reader, Reading, read_all

NO_ID = "GPU-XX"
_STRTOL = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")


def read_rocr(text: str | None, uuids: Sequence[str]) -> Reading:
    """Read the mask as ROCr does.

    Args:
        text: The variable, or None where it is unset.
        uuids: The devices of the node in ROCr's order, each as ``GPU-<16 hex>`` or ``GPU-XX``.

    Returns:
        Positions in ``uuids``. Not ``defined`` for empty tokens (an out-of-range access) and trailing garbage.
    """
    if text is None:
        return read_all(Reader.ROCR, len(uuids))
    if text == "":
        return Reading(Reader.ROCR, text, (), "an empty list hides every device")
    chosen: list[int] = []
    tokens = text.split(",")
    for position, raw in enumerate(tokens):
        token = raw.strip()
        if token == "":
            last = position == len(tokens) - 1 and position > 0
            kept = tuple(chosen) if last else ()  # a trailing comma may not make a token at all
            return Reading(Reader.ROCR, text, kept, "an empty token is read out of bounds", defined=False)
        index, reason, defined = _uuid(token, uuids) if token[0] in "Gg" else _number(token, len(uuids))
        if index is None:
            return Reading(Reader.ROCR, text, tuple(chosen), reason, defined=defined)
        if index in chosen:
            return Reading(Reader.ROCR, text, tuple(chosen), f"{token!r} names device {index} again and ends the list")
        chosen.append(index)
    return Reading(Reader.ROCR, text, tuple(chosen))


def _number(token: str, count: int) -> tuple[int | None, str, bool]:
    match = _STRTOL.match(token)
    if match is None:
        return None, f"{token!r} is no number", True
    if match.end() != len(token):
        return None, f"text after the number in {token!r}", False
    index = _strtol(match.group())
    if not 0 <= index < count:
        return None, f"{token!r} is outside 0..{count - 1}", True
    return index, "", True


def _strtol(number: str) -> int:
    """Evaluate a C integer literal with base 0: ``0x`` hexadecimal, a leading zero octal, else decimal."""
    digits = number.lstrip("+-")
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if number.startswith("-") else 1)


def _uuid(token: str, uuids: Sequence[str]) -> tuple[int | None, str, bool]:
    wanted = token.upper()
    if not wanted.startswith("GPU-") or not 5 <= len(wanted) <= 20:
        return None, f"{token!r} is not 'GPU-' with 1 to 16 hexadecimal digits", True
    found = [i for i, uuid in enumerate(uuids) if uuid != NO_ID and uuid.upper().startswith(wanted)]
    if len(found) != 1:
        return None, f"{token!r} names {len(found)} devices", True
    return found[0], "", True
