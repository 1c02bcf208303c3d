"""How torch reads the masks before it has initialised a device (torch 2.13, ``torch.cuda._parse_visible_devices``).

This is what ``torch.cuda.device_count()`` answers in a process that has not touched a GPU. It is a guess about the
runtime, not the runtime: on HIP it differs for empty texts, repeated indices, spaces and leading zeros, and it counts
the tokens of ``ROCR_VISIBLE_DEVICES`` without reading them. The package's tests compare both functions below with the
installed torch on generated texts. AMD's half runs there with torch's HIP branch forced; no AMD hardware was involved.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime_devices.errors import VisibilityError
from vime_devices.platforms import Platform

UNLIMITED = 64  # what torch assumes where no variable is set; the raw count caps it


def torch_visible(
    platform: Platform, *, rocr: str | None = None, hip: str | None = None, cuda: str | None = None
) -> list[int] | list[str]:
    """Return the list that torch takes from the variables, before any cap by the real count.

    Args:
        platform: HIP or CUDA (the build of torch).
        rocr: ``ROCR_VISIBLE_DEVICES``; read on HIP only.
        hip: ``HIP_VISIBLE_DEVICES``; read on HIP only.
        cuda: ``CUDA_VISIBLE_DEVICES``.

    Returns:
        Ordinals, or UUID texts where the first token starts with ``GPU-`` or ``MIG-``.

    Raises:
        VisibilityError: torch would raise: HIP lists more tokens than ROCr, or a token is a bare sign.
    """
    text = cuda
    if platform is Platform.HIP:
        if rocr is not None and hip is None:
            return list(range(len(rocr.split(","))))
        if rocr is not None and hip is not None and len(hip.split(",")) > len(rocr.split(",")):
            raise VisibilityError(
                "torch refuses the masks: the HIP list is longer than the ROCr list",
                where="torch.cuda.device_count",
                seen=f"HIP_VISIBLE_DEVICES={hip!r} with ROCR_VISIBLE_DEVICES={rocr!r}",
                expected="HIP indices count within the ROCr list",
                fix="set one of the two; HIP_VISIBLE_DEVICES is the one Ray and vLLM read",
            )
        text = hip if hip is not None else cuda
    if text is None:
        return list(range(UNLIMITED))
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            return _prefixed(text, prefix)
    return _ordinals(text)


def torch_count(platform: Platform, visible: Sequence[int] | Sequence[str], ids: Sequence[str]) -> tuple[int, ...]:
    """Turn torch's list into the ordinals it would count, as ``_device_count_amdsmi`` and ``_device_count_nvml`` do.

    Args:
        platform: HIP or CUDA.
        visible: The list from ``torch_visible``.
        ids: On CUDA NVML's UUIDs; on HIP amdsmi's serials (lower-case hexadecimal, no prefix). Neither is filtered by
            any variable.

    Returns:
        Positions in ``ids``; their number is torch's ``device_count()``.
    """
    found: list[int] = []
    for item in visible:
        if isinstance(item, int):
            if item >= len(ids):
                break
            found.append(item)
            continue
        wanted = item.replace("GPU-", "", 1) if platform is Platform.HIP else item
        matches = [i for i, known in enumerate(ids) if known.startswith(wanted)]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return ()
        found.append(matches[0])
    return tuple(found)


def _prefixed(text: str, prefix: str) -> list[str]:
    found: list[str] = []
    for token in text.split(","):
        if token in found:
            return []
        if not token.startswith(prefix):
            break
        found.append(token)
    return found


def _ordinals(text: str) -> list[int]:
    found: list[int] = []
    for token in text.split(","):
        number = _leading_number(token.strip())
        if number in found:
            return []
        if number < 0:
            break
        found.append(number)
    return found


def _leading_number(token: str) -> int:
    """Evaluate the sign and digits that a token starts with; -1 where there are none."""
    end = 0
    while end < len(token) and (token[end].isdigit() or (end == 0 and token[0] in "+-")):
        end += 1
    if end == 0:
        return -1
    try:
        return int(token[:end])
    except ValueError as error:
        raise VisibilityError(
            "torch refuses the mask: a token is no number",
            where="torch.cuda.device_count",
            seen=repr(token),
            expected="digits, with a sign at most before them",
            fix="write plain decimal ordinals, comma-separated, without spaces",
        ) from error
