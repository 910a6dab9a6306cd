"""Data files of an Iceberg table: written one at a time, a few rows at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.fileformat import DataFileStatistics, FileFormatFactory, FileFormatWriter
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

FILE_BYTES: Final = 128 << 20  # of rows in memory; compressed, a file is smaller
_GROUP_BYTES: Final = 32 << 20
_BATCH_ROWS: Final = 1 << 10


class StagedFiles:
    """Data files that no snapshot refers to yet.

    Attributes:
        schema: the table's, which they were written for.
        files: their entries for a snapshot, in the order of the rows.
    """

    def __init__(self, table: Table, metadata: TableMetadata, column: str, value: Any) -> None:
        self.schema = metadata.schema()
        self.files: list[DataFile] = []
        self._table = table
        self._metadata = metadata
        self._value = value
        self._column = column
        (field,) = metadata.spec().fields
        self._key = PartitionKey(
            [PartitionFieldValue(field, value)], metadata.spec(), metadata.schema()
        )
        self._paths: list[str] = []
        self._write_id = uuid.uuid4()

    def write(self, data: Path, rows: pa.Schema) -> None:
        """Write the rows of a local Parquet file, as columns of `rows`' types.

        Columns that only the table has are null.

        Raises:
            pa.ArrowException: a value doesn't fit its column's type.
            OSError: the storage fails.
        """
        with pq.ParquetFile(data) as source:
            tables = ((size, self._conform(table)) for size, table in _groups(source, rows))
            found = next(tables, None)
            while found is not None:
                num_bytes = 0
                with self._open() as writer:
                    while found and (num_bytes == 0 or num_bytes + found[0] <= FILE_BYTES):
                        writer.write(found[1])
                        num_bytes += found[0]
                        found = next(tables, None)
                self._add(writer.result())

    def remove(self) -> None:
        """Remove the files. Only when it is certain that no snapshot refers to them."""
        from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

        while self._paths:
            # What is left over does no harm, and the fault that led here is what matters.
            with suppress(OSError, BotoCoreError):
                self._table.io.delete(self._paths.pop())

    def _open(self) -> FileFormatWriter:
        # Their names sort as the rows do.
        name = f"00000-{len(self._paths):05d}-{self._write_id}.parquet"
        path = self._table.location_provider().new_data_location(name, self._key)
        self._paths.append(path)
        return FileFormatFactory.get(FileFormat.PARQUET).create_writer(
            self._table.io.new_output(path), self.schema, self._metadata.properties
        )

    def _add(self, statistics: DataFileStatistics) -> None:
        path = self._paths[-1]
        self.files.append(
            DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=path,
                file_format=FileFormat.PARQUET,
                partition=self._key.partition,
                file_size_in_bytes=len(self._table.io.new_input(path)),
                sort_order_id=None,
                spec_id=self._metadata.default_spec_id,
                equality_ids=None,
                key_metadata=None,
                **statistics.to_serialized_dict(),
            )
        )

    def _conform(self, table: pa.Table) -> pa.Table:
        """The rows with the table's columns, which carry Iceberg's field ids."""
        schema = schema_to_pyarrow(self.schema)
        columns = []
        for field in schema:
            if field.name == self._column:
                columns.append(pa.repeat(pa.scalar(self._value, field.type), table.num_rows))
            elif field.name in table.column_names:
                columns.append(table[field.name].cast(field.type))
            else:
                columns.append(pa.nulls(table.num_rows, field.type))
        return pa.Table.from_arrays(columns, schema=schema)


def _groups(source: pq.ParquetFile, rows: pa.Schema) -> Iterator[tuple[int, pa.Table]]:
    """Neighbouring rows as one row group each, as columns of `rows`' types; and its bytes."""
    pieces: list[pa.RecordBatch] = []
    num_bytes = 0
    for batch in source.iter_batches(_BATCH_ROWS, use_threads=False):
        size = batch.nbytes
        if pieces and num_bytes + size > _GROUP_BYTES:
            yield num_bytes, pa.Table.from_batches(pieces).cast(rows)
            pieces, num_bytes = [], 0
        pieces.append(batch)
        num_bytes += size
    if pieces:
        yield num_bytes, pa.Table.from_batches(pieces).cast(rows)
