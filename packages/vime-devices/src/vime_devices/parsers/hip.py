"""How HIP reads ``HIP_VISIBLE_DEVICES`` or ``CUDA_VISIBLE_DEVICES`` (once, when HIP initialises).

Source: the device initialisation of ROCm/clr, read at ROCm 6.3; not confirmed on hardware. The HIP variable wins; an
empty variable counts as unset. A token must be spelled as ``std::to_string`` would print it (``01``, ``+1`` and a
space all end the list). A repeated index is skipped. A token that contains ``GPU-`` picks the first device whose id
contains the token, case-sensitively: a bare ``GPU-`` picks device 0, and nothing is reported as ambiguous. UUIDs are
understood from ROCm 6.2 on. Positions count in the list that ROCr hands up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vime_devices.parsers.reading import Reader, Reading, read_all

UUID_SINCE = (6, 2)
_CANONICAL = re.compile(r"0|[1-9][0-9]*")


def hip_source(hip: str | None, cuda: str | None) -> str | None:
    """Return the text that HIP will read: the HIP variable, else the CUDA one; empty counts as unset.

    Args:
        hip: ``HIP_VISIBLE_DEVICES``.
        cuda: ``CUDA_VISIBLE_DEVICES``.

    Returns:
        The text, or None where neither says anything.
    """
    return hip or cuda or None


def read_hip(text: str | None, uuids: Sequence[str], *, rocm: tuple[int, int] = UUID_SINCE) -> Reading:
    """Read the mask as HIP does.

    Args:
        text: The variable that HIP reads (``hip_source``), or None; empty is the same as None.
        uuids: The devices that ROCr hands up, in order.
        rocm: The release, as (major, minor).

    Returns:
        Positions in ``uuids``.
    """
    if not text:
        return read_all(Reader.HIP, len(uuids))
    chosen: list[int] = []
    for token in text.split(","):
        index = _token(token, uuids, rocm >= UUID_SINCE)
        if index is None:
            return Reading(Reader.HIP, text, tuple(chosen), f"{token!r} names no device and ends the list")
        if index not in chosen:
            chosen.append(index)
    skipped = len(text.split(",")) - len(chosen)
    return Reading(Reader.HIP, text, tuple(chosen), f"{skipped} repeated" if skipped else "")


def _token(token: str, uuids: Sequence[str], uuid_support: bool) -> int | None:
    if "GPU-" in token:
        if not uuid_support:
            return None
        return next((i for i, uuid in enumerate(uuids) if token in uuid), None)
    if _CANONICAL.fullmatch(token) and int(token) < len(uuids):
        return int(token)
    return None
