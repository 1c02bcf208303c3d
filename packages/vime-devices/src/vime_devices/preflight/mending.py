"""The smallest change of an importer's mask that makes an exporter's ordinals right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def mend(exporter: Sequence[T], exported: Sequence[int], importer: Sequence[T]) -> list[T]:
    """Order the importer's devices so that each exported ordinal denotes the exporter's device there.

    Every device that the importer had stays. Devices are added only where the list must grow to hold an exported
    ordinal, first those that it must denote, then the exporter's others in their order.

    Args:
        exporter: The exporter's devices by ordinal.
        exported: The ordinals it exports on; each below ``len(exporter)``.
        importer: The importer's devices by ordinal.

    Returns:
        The new list; equal to ``importer`` where nothing was wrong.
    """
    fixed = {ordinal: exporter[ordinal] for ordinal in exported}
    others = [device for device in importer if device not in fixed.values()]
    length = max([len(fixed) + len(others), *(ordinal + 1 for ordinal in fixed)])
    spare = [device for device in exporter if device not in fixed.values() and device not in others]
    others += spare[: length - len(fixed) - len(others)]
    # Devices that need not move keep their place, so that the importer's own ordinals change as little as possible.
    result: dict[int, T] = dict(fixed)
    moved: list[T] = []
    for device in others:
        place = importer.index(device) if device in importer else -1
        if place >= 0 and place not in result and place < length:
            result[place] = device
        else:
            moved.append(device)
    free = (place for place in range(length) if place not in result)
    result.update(zip(free, moved, strict=False))
    return [result[place] for place in range(length)]
