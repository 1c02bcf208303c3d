"""Reading the fields of a control message that another process sent: nothing is used before it has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime_sync.errors import TransactionError


def text(message: Mapping[str, Any], key: str) -> str:
    """A non-empty string field.

    Raises:
        TransactionError: If it is missing or something else.
    """
    value = message.get(key)
    if not isinstance(value, str) or not value:
        raise TransactionError("malformed message", where=key, seen=repr(value)[:80], expected="a non-empty string")
    return value


def integer(message: Mapping[str, Any], key: str) -> int:
    """An integer field.

    Raises:
        TransactionError: If it is missing or something else.
    """
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TransactionError("malformed message", where=key, seen=repr(value)[:80], expected="an integer")
    return value


def seconds(message: Mapping[str, Any], key: str, default: float) -> float:
    """A field that holds a positive, finite number of seconds.

    Raises:
        TransactionError: If it is something else.
    """
    value = message.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        raise TransactionError(
            "malformed message", where=key, seen=repr(value)[:80], expected="seconds, more than 0 and less than 1e6"
        )
    return float(value)
