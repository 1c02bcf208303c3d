"""Prompts from a Parquet file, read column by column so that unused columns cost nothing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vime_rollout.data.rows import RowKeys, fingerprint, to_prompt
from vime_rollout.errors import DataError
from vime_rollout.sample import Prompt


class ParquetData:
    """The prompts of one Parquet file, in file order.

    Args:
        path: The file.
        keys: Which columns mean what.

    Raises:
        DataError: When the file cannot be read, has no prompt column, has a bad row (named by number), or has no row.
    """

    def __init__(self, path: Path, keys: RowKeys) -> None:
        """Read the named columns and check every row."""
        try:
            columns = pq.read_schema(path).names
            wanted = [c for c in (keys.prompt, keys.label, keys.metadata, keys.id) if c is not None and c in columns]
            table = pq.read_table(path, columns=wanted)
        except (OSError, pa.ArrowException) as error:
            raise DataError("data file cannot be read", where=str(path), seen=str(error)) from error
        if keys.prompt not in columns:
            raise DataError(f"no column {keys.prompt!r}", where=str(path), seen="columns " + ", ".join(columns))
        if table.num_rows == 0:
            raise DataError("data set is empty", where=str(path), expected="at least one row")
        self.name = path.stem
        self.fingerprint = fingerprint(path.read_bytes(), repr(keys))
        self._prompts: list[Prompt] = [
            to_prompt(row, keys, name=self.name, number=number, where=f"{path} row {number}")
            for number, row in enumerate(table.to_pylist())
        ]

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    def __getitem__(self, row: int) -> Prompt:
        """Return the prompt of one row."""
        return self._prompts[row]
