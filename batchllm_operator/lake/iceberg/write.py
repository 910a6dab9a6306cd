"""Writes data files of an Iceberg table, one at a time, by row groups."""

from __future__ import annotations

import json
import tempfile
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyiceberg.io import InputFile, OutputFile, OutputStream
from pyiceberg.io.fileformat import DataFileStatistics, FileFormatFactory
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.metadata import TableMetadata

from batchllm_operator.lake.data_files import Room, fit, row_groups
from batchllm_operator.lake.stored_columns import StoredColumns

_NO_LIMIT: Final = {TableProperties.PARQUET_ROW_GROUP_LIMIT: str(1 << 26)}
"""Rows in a row group, unless the table has a limit: groups are cut by their bytes."""
_BOUNDS: Final = ("lower_bounds", "upper_bounds")


def check_writer(table: Table, metadata: TableMetadata) -> None:
    """Write a file without rows to local disk, with the table's properties.

    Raises:
        ValueError: pyiceberg or Arrow refuses a property.
    """
    table.location_provider()
    schema = metadata.schema()
    with tempfile.TemporaryDirectory(prefix="batchllm-iceberg-") as folder:
        file = PyArrowFileIO().new_output(f"{folder}/data.parquet")
        model = FileFormatFactory.get(FileFormat.PARQUET)
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # of properties without an effect
                model.create_writer(file, schema, {**_NO_LIMIT, **metadata.properties}) as writer,
            ):
                writer.write(schema_to_pyarrow(schema).empty_table())
            writer.result()
        except OSError as error:  # Arrow's, of a codec that it lacks
            raise ValueError(str(error)) from error


class _CountedFile(OutputFile):
    """A file that knows its write position."""

    def __init__(self, file: OutputFile) -> None:
        super().__init__(file.location)
        self._file = file
        self._stream: OutputStream | None = None

    def __len__(self) -> int:
        return len(self._file)

    @property
    def position(self) -> int:
        return 0 if self._stream is None else int(self._stream.tell())

    def exists(self) -> bool:
        return self._file.exists()

    def to_input_file(self) -> InputFile:
        return self._file.to_input_file()

    def create(self, overwrite: bool = False) -> OutputStream:
        self._stream = self._file.create(overwrite)
        return self._stream


class StagedFiles:
    """Data files that no snapshot refers to yet.

    `schema` is the table schema that they were written for; `files` are their entries for a
    snapshot, in row order, and `entries` the same as JSON.
    """

    def __init__(
        self, table: Table, metadata: TableMetadata, column: str, value: Any, number: int = 0
    ) -> None:
        """`number` begins the names of files, so that those of several sort in row order, too."""
        self.schema = metadata.schema()
        self.files: list[DataFile] = []
        self.entries: list[str] = []
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
        self._number = number

    def write(self, data: Sequence[Path], rows: StoredColumns, most_file_bytes: int) -> None:
        """Write the rows of local Parquet files; columns that only the table has are null.

        Args:
            data: the files, in row order.
            rows: their columns.
            most_file_bytes: upper bound of a file, unless one row has more.

        Raises:
            TableError: a value doesn't fit the table.
            OSError: the storage fails.
        """
        groups = (
            group
            for table in row_groups(data, rows)
            for group in fit(self._conform(table), most_file_bytes)
        )
        group = next(groups, None)
        while group is not None:
            file, room = self._open(), Room(most_file_bytes)
            properties = {**_NO_LIMIT, **self._metadata.properties}
            model = FileFormatFactory.get(FileFormat.PARQUET)
            with model.create_writer(file, self.schema, properties) as writer:
                while group is not None and room.takes(group, file.position):
                    writer.write(group.rows)
                    group = next(groups, None)
            self._add(writer.result())

    def remove(self) -> None:
        """Remove the files. Only if no snapshot can refer to them."""
        from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

        while self._paths:
            # Leftovers are harmless, and must not hide the error that led here.
            with suppress(OSError, BotoCoreError):
                self._table.io.delete(self._paths.pop())

    def _open(self) -> _CountedFile:
        # Names sort in row order.
        name = f"{self._number:05d}-{len(self._paths):05d}-{self._write_id}.parquet"
        path = self._table.location_provider().new_data_location(name, self._key)
        self._paths.append(path)
        return _CountedFile(self._table.io.new_output(path))

    def _add(self, statistics: DataFileStatistics) -> None:
        path = self._paths[-1]
        size = len(self._table.io.new_input(path))
        known = {"file_path": path, "file_size_in_bytes": size, **statistics.to_serialized_dict()}
        self.take([json.dumps(known, default=bytes.hex)])

    def take(self, entries: Sequence[str]) -> None:
        """Refer to files that were written for the same columns, also by other processes."""
        self.entries += entries
        for entry in entries:
            known = json.loads(entry)
            for name, by_column in known.items():
                if isinstance(by_column, dict):
                    value = bytes.fromhex if name in _BOUNDS else int
                    known[name] = {int(column): value(v) for column, v in by_column.items()}
            self.files.append(
                DataFile.from_args(
                    content=DataFileContent.DATA,
                    file_format=FileFormat.PARQUET,
                    partition=self._key.partition,
                    sort_order_id=None,
                    spec_id=self._metadata.default_spec_id,
                    equality_ids=None,
                    key_metadata=None,
                    **known,
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
