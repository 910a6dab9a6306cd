"""Parquet files whose bytes don't depend on how their rows were batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS: Final = 1 << 10
"""Small, because rows hold texts and a whole group is in memory."""


class RowGroupWriter:
    """Writes row groups of one size, the last one shorter; used as a context manager."""

    def __init__(
        self, path: Path, schema: pa.Schema, num_rows: int = ROW_GROUP_ROWS, **options: Any
    ) -> None:
        """Create the local file; `options` are those of `pyarrow.parquet.ParquetWriter`."""
        self._writer = pq.ParquetWriter(path, schema, **options)
        self._schema, self._num_at_once = schema, num_rows
        self._kept: list[pa.Table] = []
        self._num_kept = 0

    def __enter__(self) -> RowGroupWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, table: pa.Table) -> None:
        self._kept.append(table.cast(self._schema))
        self._num_kept += table.num_rows
        if self._num_kept < self._num_at_once:
            return
        rows = pa.concat_tables(self._kept).combine_chunks()  # chunks would show in the pages
        num_whole = rows.num_rows - rows.num_rows % self._num_at_once
        self._writer.write_table(rows.slice(0, num_whole), row_group_size=self._num_at_once)
        self._kept, self._num_kept = [rows.slice(num_whole)], rows.num_rows - num_whole

    def close(self) -> None:
        """Write the rest. Closing again does nothing."""
        if self._num_kept:
            self._writer.write_table(pa.concat_tables(self._kept).combine_chunks())
            self._kept, self._num_kept = [], 0
        self._writer.close()
