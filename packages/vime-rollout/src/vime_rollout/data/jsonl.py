"""Prompts from a JSONL file: one JSON object a line; blank lines are skipped.

The whole file is read and checked when it is opened: a broken line stops the run before anything expensive starts,
with its file and line number, and not in the middle of the first epoch.
"""

from __future__ import annotations

import json
from pathlib import Path

from vime_rollout.data.rows import RowKeys, fingerprint, to_prompt
from vime_rollout.errors import DataError
from vime_rollout.sample import Prompt


class JsonlData:
    """The prompts of one JSONL file, in file order.

    Args:
        path: The file, UTF-8.
        keys: Which keys of a line mean what.

    Raises:
        DataError: When the file cannot be read, a line is broken (file and line are named), or there is no line.
    """

    def __init__(self, path: Path, keys: RowKeys) -> None:
        """Read and check every line."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError("data file cannot be read", where=str(path), seen=str(error)) from error
        self.name = path.stem
        self.fingerprint = fingerprint(content, repr(keys))
        self._prompts: list[Prompt] = []
        for line_number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                self._prompts.append(self._parse(line, f"{path}:{line_number}", keys))
        if not self._prompts:
            raise DataError("data set is empty", where=str(path), expected="at least one JSON object, one a line")

    def _parse(self, line: bytes, where: str, keys: RowKeys) -> Prompt:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(
                "broken JSONL line",
                where=where,
                seen=f"{error}: {line[:60]!r}",
                expected="one JSON object",
                fix="mend or remove the line",
            ) from error
        if not isinstance(row, dict):
            raise DataError("JSONL line is no object", where=where, seen=type(row).__name__, expected="one JSON object")
        return to_prompt(row, keys, name=self.name, number=len(self._prompts), where=where)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    def __getitem__(self, row: int) -> Prompt:
        """Return the prompt of one row."""
        return self._prompts[row]
