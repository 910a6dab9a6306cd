"""Iceberg tables of any catalog that pyiceberg knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from batchllm_operator.errors import TableError
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors
from batchllm_operator.lake.iceberg.partition import PartitionView, partition_names
from batchllm_operator.lake.iceberg.read import read_metadata
from batchllm_operator.lake.iceberg.replacement import Replacement, stored_columns
from batchllm_operator.lake.iceberg.schema import arrow_schema, storable_schema
from batchllm_operator.lake.publishing import check_name
from batchllm_operator.lake.scanning import Scan, reading
from batchllm_operator.lake.schema import StoredColumns, check_own
from batchllm_operator.lake.table import FilePart, InputFile, Snapshot
from batchllm_operator.lake.versioned import VersionedTable
from batchllm_operator.spec import TableAddress

_VERSION: Final = re.compile(r"iceberg:(none|[0-9]+)/([0-9]+)")  # of the snapshot, of the schema


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> IcebergTable:
    return IcebergTable(address, partition_column, most_file_bytes)


class IcebergTable(VersionedTable[Table]):
    """A table in an Iceberg catalog."""

    def __init__(self, address: TableAddress, partition_column: str, most_file_bytes: int) -> None:
        """The table need not exist yet. `most_file_bytes` bounds new data files.

        Raises:
            SpecError: pyiceberg's configuration has no such catalog.
            StorageError: the catalog can't be reached.
        """
        super().__init__(address.uri, partition_column, most_file_bytes)
        self._catalog = CatalogTable(address)
        self._last_view: PartitionView | None = None

    def partitions(self) -> list[str]:
        """Read from metadata, so the table must be partitioned by the column's values."""
        table = self._catalog.load()
        return [] if table is None else partition_names(table, self.uri, self.partition_column)

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        view = self._view(snapshot)
        with self._reading(snapshot.partition, file.name):
            return read_metadata(view.table, view.task_of(file))

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        check_name(self.uri, partition)
        if self._catalog.load() is not None:
            return super().check_outputs(partition, columns, add_columns=add_columns)
        rows = self._storable(columns)
        self._catalog.check_create(rows, self.partition_column)
        return stored_columns(self.uri, None, rows)

    def _latest(self) -> Table | None:
        return self._catalog.load()

    def _create(self, columns: pa.Schema) -> Table:
        return self._catalog.create(self._storable(columns), self.partition_column)

    def _storable(self, columns: pa.Schema) -> pa.Schema:
        check_own(f"table {self.uri}", self.partition_column, columns)
        return storable_schema(f"table {self.uri}", columns)

    def _pin(self, version: Table, partition: str) -> Snapshot:
        return self._now(version, partition).snapshot()

    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        return self._view(snapshot).read(file, scan, part)

    def _now(self, table: Table, partition: str) -> PartitionView:
        """The partition in the table's newest state."""
        last = self._last_view
        if last is None or last.table is not table or last.partition != partition:
            current = table.current_snapshot()
            snapshot_id = None if current is None else current.snapshot_id
            last = self._looked_at(table, partition, snapshot_id, table.schema())
        return last

    def _view(self, snapshot: Snapshot) -> PartitionView:
        """The partition as it was; the last one is kept, for scans of many files."""
        last = self._last_view
        if last is not None and (last.version, last.partition) == (
            snapshot.version,
            snapshot.partition,
        ):
            return last
        where = f"table {self.uri}: snapshot {snapshot.version}"
        table, known = self._catalog.load(), _VERSION.fullmatch(snapshot.version)
        if known is None:
            raise TableError(f"{where} isn't one of an Iceberg table")
        snapshot_id = None if known[1] == "none" else int(known[1])
        if table is None or (
            snapshot_id is not None and table.metadata.snapshot_by_id(snapshot_id) is None
        ):
            raise TableError(
                f"{where} is gone: it was expired; keep snapshots for as long as jobs read"
            )
        # Names may mean other columns in the table's newest schema.
        schema = table.schemas().get(int(known[2]))
        if schema is None or arrow_schema(schema) != snapshot.schema:
            raise TableError(f"{where}: its schema is gone from the table's metadata")
        return self._looked_at(table, snapshot.partition, snapshot_id, schema)

    def _looked_at(
        self, table: Table, partition: str, snapshot_id: int | None, schema: Schema
    ) -> PartitionView:
        column = self.partition_column
        self._last_view = PartitionView(table, self.uri, column, partition, snapshot_id, schema)
        return self._last_view

    @contextmanager
    def _reading(self, partition: str, file: str) -> Iterator[None]:
        # `reading` is the inner one: errors that it lets through are pyiceberg's.
        with iceberg_errors(self.uri), reading(self.uri, partition, file):
            yield

    def _change(
        self, version: Table | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        assert version is not None, "it is created before rows are published"
        rows, view = self._storable(columns), self._now(version, partition)
        return Replacement(
            self._catalog, view, columns, rows, self.most_file_bytes, add_columns=add_columns
        )
