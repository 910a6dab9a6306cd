"""Iceberg tables of any catalog that pyiceberg knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
from pyiceberg.table import Table

from batchllm_operator.errors import TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors
from batchllm_operator.lake.iceberg.partition import PartitionView, partition_names
from batchllm_operator.lake.iceberg.publish import (
    Overwrite,
    Publisher,
    check_replace,
    stored_columns,
)
from batchllm_operator.lake.iceberg.schema import arrow_schema, storable_schema
from batchllm_operator.lake.iceberg.write import StagedFiles, check_writer
from batchllm_operator.lake.publishing import Publication, StagedRows, Staging, check_name
from batchllm_operator.lake.schema import check_own
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.lake.table import FilePart, InputFile, LakeTable, Snapshot
from batchllm_operator.spec import FilterTerm, TableAddress

_VERSION: Final = re.compile(r"iceberg:(none|[0-9]+)/([0-9]+)")  # of the snapshot, of the schema


@dataclass(frozen=True, slots=True)
class IcebergStaging(Staging):
    """See `Staging`."""

    column: str
    partition: str
    most_file_bytes: int

    def put(self, data: Path, number: int) -> list[str]:
        rows = storable_schema(f"table {self.uri}", self.schema)
        table = CatalogTable(TableAddress.parse(self.uri)).load()
        if table is None:
            raise TableError(f"output {self.uri}: the table was removed meanwhile; commit again")
        with iceberg_errors(self.uri):
            view = PartitionView.now(table, self.uri, self.column, self.partition)
            metadata = Overwrite(table, rows).metadata
            staged = StagedFiles(table, metadata, self.column, view.value, number)
            stored = stored_columns(self.uri, table, rows)
            staged.write(files_of(data), stored, self.most_file_bytes)
        return staged.entries


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> IcebergTable:
    return IcebergTable(address, partition_column, most_file_bytes)


class IcebergTable(LakeTable):
    """A table in an Iceberg catalog."""

    most_file_bytes: int

    def __init__(self, address: TableAddress, partition_column: str, most_file_bytes: int) -> None:
        """The table need not exist yet. `most_file_bytes` bounds new data files.

        Raises:
            SpecError: pyiceberg's configuration has no such catalog.
            StorageError: the catalog can't be reached.
        """
        super().__init__(address.uri, partition_column, most_file_bytes)
        self._catalog_table = CatalogTable(address)
        self._last_view: tuple[tuple[str, str], PartitionView] | None = None

    def partitions(self) -> list[str]:
        """Read from metadata, so the table must be partitioned by the column's values."""
        table = self._catalog_table.load()
        return [] if table is None else partition_names(table, self.uri, self.partition_column)

    def snapshot(self, partition: str) -> Snapshot:
        table = self._load()
        view = PartitionView.now(table, self.uri, self.partition_column, partition)
        root, tasks = f"{table.location().rstrip('/')}/", view.tasks()
        snapshot_id = "none" if view.snapshot_id is None else view.snapshot_id
        files = [
            InputFile(
                name=task.file.file_path.removeprefix(root),
                size_bytes=task.file.file_size_in_bytes,
                num_rows=task.file.record_count,
                version="immutable",
            )
            for task in tasks
        ]
        version = f"iceberg:{snapshot_id}/{table.schema().schema_id}"
        coordinates = view.coordinates(tasks)
        return Snapshot.of(
            partition, version, files, view.arrow_schema, self.partition_column, coordinates
        )

    def _batches(
        self,
        snapshot: Snapshot,
        schema: pa.Schema,
        conditions: Sequence[FilterTerm],
        condition: pds.Expression | None,
        part: FilePart | None,
    ) -> Iterator[pa.RecordBatch]:
        yield from self._view(snapshot).batches(schema.names, conditions, condition, part)

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        return self._view(snapshot).footer(file)

    def _view(self, snapshot: Snapshot) -> PartitionView:
        """The partition as it was; the last one is kept, for scans of many parts."""
        pinned = (snapshot.version, snapshot.partition)
        if self._last_view is not None and self._last_view[0] == pinned:
            return self._last_view[1]
        table = self._load()
        where = f"table {self.uri}: snapshot {snapshot.version}"
        known = _VERSION.fullmatch(snapshot.version)
        if known is None:
            raise TableError(f"{where} isn't one of an Iceberg table")
        snapshot_id = None if known[1] == "none" else int(known[1])
        if snapshot_id is not None and table.metadata.snapshot_by_id(snapshot_id) is None:
            raise TableError(
                f"{where} is gone: it was expired; keep snapshots for as long as jobs read"
            )
        # Names may mean other columns in the table's newest schema.
        schema = table.schemas().get(int(known[2]))
        if schema is None or arrow_schema(schema) != snapshot.schema:
            raise TableError(f"{where}: its schema is gone from the table's metadata")
        view = PartitionView(
            table, self.uri, self.partition_column, snapshot.partition, snapshot_id, schema
        )
        self._last_view = (pinned, view)
        return view

    def published(self, partition: str) -> Publication | None:
        table = self._catalog_table.load()
        if table is None:
            return None
        return PartitionView.now(table, self.uri, self.partition_column, partition).published()

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        where = f"table {self.uri}"
        check_name(self.uri, partition)
        check_own(where, self.partition_column, columns)
        rows = storable_schema(where, columns)
        table = self._catalog_table.load()
        if table is None:
            self._catalog_table.check_create(rows, self.partition_column)
            return stored_columns(self.uri, None, rows)
        view = PartitionView.now(table, self.uri, self.partition_column, partition)
        old = [task.file for task in view.tasks()]
        check_replace(table, view, old, rows, add_columns=add_columns)
        with iceberg_errors(self.uri):
            check_writer(table, Overwrite(table, rows).metadata)
        return stored_columns(self.uri, table, rows)

    def staging(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> IcebergStaging:
        self.check_outputs(partition, columns, add_columns=add_columns)
        rows = storable_schema(f"table {self.uri}", columns)
        column = self.partition_column
        table = self._catalog_table.load() or self._catalog_table.create(rows, column)
        with iceberg_errors(self.uri):
            stored = arrow_schema(Overwrite(table, rows).metadata.schema())
        most = self.most_file_bytes
        return IcebergStaging(self.uri, columns, stored, column, partition, most)

    @contextmanager
    def _attempt(
        self, publication: Publication, data: Path | StagedRows, add_columns: bool
    ) -> Iterator[Publisher]:
        publisher = Publisher(
            self._catalog_table,
            self.partition_column,
            publication,
            data,
            self.most_file_bytes,
            add_columns=add_columns,
        )
        try:
            yield publisher
        finally:
            publisher.close()

    def _load(self) -> Table:
        table = self._catalog_table.load()
        if table is None:
            raise TableError(
                f"table {self.uri}: the catalog has no such table; check its name, or write the"
                " table first"
            )
        return table
