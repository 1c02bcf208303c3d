"""Which devices a child process may see, in which order, and where its own are among them.

HIP. An IPC handle of ROCm 7 and later carries the exporter's ordinal, and opening it looks that ordinal up in the
importer's list; RCCL likewise sends through peers that a narrow mask has hidden. So a mask on HIP is never shrunk, only
reordered: the engine's own devices first, then every other device of the node in its order. The published fix that
this generalises ran on 8x MI308X with ROCm 7.14; this package has only been run against an emulation of it.

CUDA. The driver resolves peers by itself; the mask is the engine's own devices, spelled as the caller spelled them.

Entries are selectors as they stand in a mask: decimal indices or UUIDs, one kind per list. An index counts in the list
that is in force *below every variable* (the driver's list), so an entry keeps its meaning when a variable is removed.
``compose`` turns positions in an inherited mask into such entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vime_devices.errors import MaskError, PlatformError
from vime_devices.platforms import Platform

HIDE_ALL = "-1"  # the only text that hides every device for every reader; an empty one does not
_INDEX = re.compile(r"0|[1-9][0-9]*")
_RANGE = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_AMD_UUID = re.compile(r"GPU-[0-9a-fA-F]{16}")
_NVIDIA_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask and where the process finds its own devices under it.

    Attributes:
        text: The value of the variable; never empty.
        entries: The devices in the order in which the process will enumerate them.
        local_indices: Ordinals of the process's own devices.
    """

    text: str
    entries: tuple[str, ...]
    local_indices: tuple[int, ...]


def check_entries(platform: Platform, entries: Sequence[str | int], *, where: str = "device list") -> tuple[str, ...]:
    """Return the entries as mask tokens that every reader of the platform takes alike.

    Args:
        platform: Whose readers will see them.
        entries: Decimal indices (text or int) or UUIDs; AMD ids come back with lower-case digits, because HIP compares
            case; anything of NVIDIA's comes back as it was.
        where: What the list is, for the error.

    Returns:
        The tokens.

    Raises:
        MaskError: A token that some reader would refuse or read differently, a repeated device, or mixed kinds.
    """
    tokens = tuple(_token(platform, str(entry), where) for entry in entries)
    repeated = sorted({token for token in tokens if tokens.count(token) > 1})
    if repeated:
        raise MaskError(
            "a device is listed twice",
            where=where,
            seen=",".join(tokens),
            expected="each device once (CUDA and torch answer a repetition with no device at all)",
            fix=f"drop the second {', '.join(repeated)}",
        )
    if len({bool(_INDEX.fullmatch(token)) for token in tokens}) > 1:
        raise MaskError(
            "indices and UUIDs are mixed",
            where=where,
            seen=",".join(tokens),
            expected="one kind of selector (torch ends the list at the first of the other kind)",
            fix="write every device as an index, or every device as a UUID",
        )
    return tokens


def parse_devices(platform: Platform, text: str) -> tuple[str, ...]:
    """Read a device list as a person writes it: ``0-7``, ``0,2,4-6`` or UUIDs, comma-separated.

    Args:
        platform: Whose selectors these are.
        text: The list.

    Returns:
        The tokens in the order written.

    Raises:
        MaskError: As ``check_entries``, or a range that runs backwards.
    """
    entries: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        match = _RANGE.fullmatch(item)
        if match is None:
            entries.append(item)
            continue
        first, last = int(match.group(1)), int(match.group(2))
        if last < first:
            raise MaskError(
                "a range runs backwards", where=text, seen=item, expected="FIRST-LAST", fix=f"write {last}-{first}"
            )
        entries += [str(index) for index in range(first, last + 1)]
    return check_entries(platform, entries)


def devices_at(node: Sequence[str | int], offset: int, count: int) -> tuple[str, ...]:
    """Take ``count`` devices of a node from position ``offset``; never an index that the node does not have.

    Args:
        node: The node's real device list.
        offset: Position of the first.
        count: How many.

    Returns:
        The entries.

    Raises:
        MaskError: The slice runs past the list.
    """
    if offset < 0 or count < 0 or offset + count > len(node):
        raise MaskError(
            "an engine's devices run past the node",
            where=f"node of {len(node)} devices: {','.join(map(str, node))}",
            seen=f"offset {offset} with {count} devices",
            expected=f"offset + count <= {len(node)}",
            fix="count the offset within one node, from its real device list",
        )
    return tuple(str(entry) for entry in node[offset : offset + count])


def engine_mask(platform: Platform, own: Sequence[str | int], node: Sequence[str | int]) -> Mask:
    """Build the mask of a process that owns some devices of a node.

    Args:
        platform: HIP or CUDA.
        own: Its devices, in the order in which it will number them; may be empty.
        node: Every device of the node that the launcher may use.

    Returns:
        On HIP ``own`` followed by the rest of ``node``; on CUDA ``own``. ``-1`` where ``own`` is empty.

    Raises:
        MaskError: ``own`` holds a device that ``node`` lacks, or either list is malformed.
        PlatformError: The platform has no masks.
    """
    if platform is Platform.CPU:
        raise PlatformError(
            "masks do not exist on the CPU platform",
            where="engine_mask",
            seen="Platform.CPU",
            expected="hip or cuda",
            fix="use child_environment, which leaves a CPU process's environment as it is",
        )
    own_tokens = check_entries(platform, own, where="own devices")
    node_tokens = check_entries(platform, node, where="node devices")
    strangers = [token for token in own_tokens if token not in node_tokens]
    if strangers:
        raise MaskError(
            "own devices that the node does not have",
            where=f"node devices {','.join(node_tokens) or 'none'}",
            seen=", ".join(strangers),
            expected="own devices drawn from the node's list, spelled as they are there",
            fix="take them from the node's list (visible_devices), not from a range of ranks",
        )
    if not own_tokens:
        return Mask(HIDE_ALL, (), ())
    entries = own_tokens
    if platform is Platform.HIP:
        entries += tuple(token for token in node_tokens if token not in own_tokens)
    return Mask(",".join(entries), entries, tuple(range(len(own_tokens))))


def compose(
    platform: Platform, outer: Sequence[str | int], inner: Sequence[str | int], *, uuids: Sequence[str] = ()
) -> tuple[str, ...]:
    """Apply a mask whose indices count within another, and express the result in the outer one's entries.

    Args:
        platform: HIP or CUDA.
        outer: Entries that are in force.
        inner: Positions in ``outer``, or UUIDs of devices in it.
        uuids: The driver's list of UUIDs; needed only where ``inner`` names UUIDs and ``outer`` indices.

    Returns:
        Entries of ``outer``: never more than it had.

    Raises:
        MaskError: A position past ``outer``, or a UUID that is not in it or cannot be matched.
    """
    outer_tokens = check_entries(platform, outer, where="inherited mask")
    found: list[str] = []
    for token in check_entries(platform, inner, where="mask within the inherited one"):
        match = _within(token, outer_tokens, uuids)
        if match is None:
            raise MaskError(
                "a mask names a device that the mask beneath it hides",
                where=f"inherited mask {','.join(outer_tokens) or 'none'}",
                seen=token,
                expected=f"an index below {len(outer_tokens)}, or the UUID of a device in the inherited mask",
                fix="indices count from 0 within the inherited mask; or remove one of the two masks",
            )
        found.append(match)
    return check_entries(platform, found, where="composed mask")


def _within(token: str, outer: Sequence[str], uuids: Sequence[str]) -> str | None:
    if _INDEX.fullmatch(token):
        return outer[int(token)] if int(token) < len(outer) else None
    if token in outer:
        return token
    return str(uuids.index(token)) if token in uuids and str(uuids.index(token)) in outer else None


def _token(platform: Platform, entry: str, where: str) -> str:
    if _INDEX.fullmatch(entry):
        return entry
    if platform is Platform.HIP and _AMD_UUID.fullmatch(entry):
        return "GPU-" + entry[4:].lower()
    if platform is Platform.CUDA and _NVIDIA_UUID.fullmatch(entry):
        return entry
    raise MaskError(
        "a device selector that readers would not agree on",
        where=where,
        seen=repr(entry),
        expected="a plain decimal index or " + ("GPU-<16 hex digits>" if platform is Platform.HIP else "a UUID"),
        fix="no spaces, signs, leading zeros or empty items; write '-1' through the writer to hide every device",
    )
