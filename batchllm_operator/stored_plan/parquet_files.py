"""Parquet files of plans: checked as they are read, with bytes that don't depend on batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import PlanError

ROW_GROUP_ROWS: Final = 1 << 10
"""Small, because rows hold texts and a whole group is in memory."""


class PlanFile(pq.ParquetFile):  # type: ignore[misc]  # pyarrow ships no types
    """A Parquet file whose faults are `PlanError`s.

    Args:
        where: names it in errors.
        columns: columns that it must have, in that order, with these types.
        num_rows: the number of rows that it must have; None for any.

    Raises `PlanError`: it isn't Parquet, lacks a column, or has another number of rows; from the
    methods: the data are damaged.
    """

    def __init__(
        self, file: IO[bytes] | Path, where: str, columns: pa.Schema, num_rows: int | None = None
    ) -> None:
        self._where = where
        with self._errors():
            super().__init__(file)
        fields = [field for field in self.schema_arrow if field.name in columns.names]
        if [(f.name, f.type) for f in fields] != [(f.name, f.type) for f in columns] or any(
            field.nullable and not columns.field(field.name).nullable for field in fields
        ):
            raise PlanError(
                f"{where} holds other columns than this release reads; make the plan again"
            )
        if num_rows is not None and self.metadata.num_rows != num_rows:
            raise PlanError(
                f"{where} has {counted(self.metadata.num_rows, 'row')} where the manifest says"
                f" {num_rows:,}; make the plan again"
            )

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        with self._errors():
            return super().read_row_group(*args, **kwargs)

    def read_row_groups(self, row_groups: Sequence[int], *args: Any, **kwargs: Any) -> pa.Table:
        with self._errors():
            return super().read_row_groups(row_groups, *args, **kwargs)

    def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        batches = super().iter_batches(*args, **kwargs)
        while True:
            with self._errors():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            # Arrow raises OSError for damaged data too, but without an errno.
            if isinstance(error, MemoryError) or getattr(error, "errno", None):
                raise
            raise PlanError(f"{self._where} is damaged; make the plan again: {error}") from error


class RowGroupWriter:
    """Writes row groups of `num_rows` to a new local file, the last one shorter; a context manager.

    `options` are those of `pyarrow.parquet.ParquetWriter`.
    """

    def __init__(
        self, path: Path, schema: pa.Schema, num_rows: int = ROW_GROUP_ROWS, **options: Any
    ) -> None:
        self._writer = pq.ParquetWriter(path, schema, **options)
        self._num_at_once = num_rows
        self._kept = schema.empty_table()

    def __enter__(self) -> RowGroupWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, table: pa.Table) -> None:
        self._kept = pa.concat_tables([self._kept, table.cast(self._kept.schema)])
        if num_whole := self._kept.num_rows // self._num_at_once * self._num_at_once:
            rows = self._kept.combine_chunks()  # chunks would show in the pages
            self._writer.write_table(rows.slice(0, num_whole), row_group_size=self._num_at_once)
            self._kept = rows.slice(num_whole)

    def close(self) -> None:
        """Write the rest. Closing again does nothing."""
        if self._kept.num_rows:
            self._writer.write_table(self._kept.combine_chunks())
            self._kept = self._kept.slice(0, 0)
        self._writer.close()
