"""A Parquet file of a plan, checked as it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import PlanError


class PlanFile(pq.ParquetFile):  # type: ignore[misc]  # pyarrow ships no types
    """A Parquet file whose faults are `PlanError`s.

    Args:
        file: the open file, or a local path.
        where: names it in errors.
        columns: columns that it must have, in that order, with these types.
        num_rows: the number of rows that it must have; None for any.

    Raises:
        PlanError: it isn't Parquet, lacks a column, or has another number of rows; from the
            methods: the data are damaged.
    """

    def __init__(
        self, file: IO[bytes] | Path, where: str, columns: pa.Schema, num_rows: int | None = None
    ) -> None:
        self._where = where
        with self._errors():
            super().__init__(file)
        found = [field for field in self.schema_arrow if field.name in columns.names]
        if [(f.name, f.type) for f in found] != [(f.name, f.type) for f in columns] or any(
            field.nullable and not columns.field(field.name).nullable for field in found
        ):
            raise PlanError(
                f"{where} holds other columns than this release reads; make the plan again"
            )
        if num_rows is not None and self.metadata.num_rows != num_rows:
            raise PlanError(
                f"{where} has {counted(self.metadata.num_rows, 'row')} where the manifest says"
                f" {num_rows:,};"
                " make the plan again"
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
