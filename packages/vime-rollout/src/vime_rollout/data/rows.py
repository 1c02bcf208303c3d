"""From one row of a file to one ``Prompt``: shared by the JSONL and the Parquet reader.

A row is a mapping. The prompt key holds a string or a list of chat messages (``{"role": ..., "content": ...}``); the
label key holds the reference answer; the metadata key holds a mapping. Only the prompt key must be there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime_rollout.errors import DataError
from vime_rollout.sample import Prompt


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Which columns of a row mean what.

    Args:
        prompt: String or chat messages; required in every row.
        label: Reference answer; turned into a string. A row without it has no label. ``None`` reads none.
        metadata: Mapping of JSON values; a row without it has none. ``None`` reads none.
        id: Stable name of the row; without it, or with ``None``, the row number is the name.
    """

    prompt: str = "prompt"
    label: str | None = "label"
    metadata: str | None = "metadata"
    id: str | None = "id"


def to_prompt(row: Mapping[str, Any], keys: RowKeys, *, name: str, number: int, where: str) -> Prompt:
    """Build the prompt of one row.

    Args:
        row: The row.
        keys: Which columns to read.
        name: Name of the data set, the first part of the prompt's id.
        number: Row number from 0, the second part unless the row carries an id.
        where: File and line, for errors.

    Raises:
        DataError: When the prompt is missing, empty or of a wrong type, or the metadata is no mapping.
    """
    if keys.prompt not in row:
        raise DataError(
            f"row has no {keys.prompt!r}",
            where=where,
            seen="keys " + ", ".join(map(repr, row)),
            fix="name the prompt's key in the data configuration",
        )
    metadata = _get(row, keys.metadata)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise DataError(f"{keys.metadata!r} is no mapping", where=where, seen=type(metadata).__name__)
    row_id = _get(row, keys.id)
    return Prompt(
        id=f"{name}:{number if row_id is None else row_id}",
        label=_label(_get(row, keys.label)),
        metadata=dict(metadata or {}),
        **_question(row[keys.prompt], where, keys.prompt),
    )


def _question(value: Any, where: str, key: str) -> dict[str, Any]:
    if isinstance(value, str):
        if value:
            return {"text": value}
        raise DataError(f"{key!r} is empty", where=where, expected="a string or chat messages")
    if not isinstance(value, Sequence) or not value:
        raise DataError(
            f"{key!r} is no prompt", where=where, seen=repr(value)[:80], expected="a string or chat messages"
        )
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(
                f"{key!r} holds something that is no chat message",
                where=where,
                seen=repr(message)[:80],
                expected='{"role": ..., "content": ...}',
            )
    return {"messages": tuple(dict(m) for m in value)}


def as_chat(prompt: Prompt, system_prompt: str | None) -> Prompt:
    """Return the prompt as chat messages: a string becomes one user message, after a system message if there is one."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    if system_prompt is not None:
        messages = ({"role": "system", "content": system_prompt}, *messages)
    return dataclasses.replace(prompt, messages=messages, text="")


def _get(row: Mapping[str, Any], key: str | None) -> Any:
    return None if key is None else row.get(key)


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def fingerprint(*parts: bytes | str) -> str:
    """Return a short digest that tells data sets apart, so that a position is never restored into another one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
