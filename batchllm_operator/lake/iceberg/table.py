"""Iceberg tables of any catalog that pyiceberg knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table

from batchllm_operator.errors import TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors
from batchllm_operator.lake.iceberg.commit import Overwrite
from batchllm_operator.lake.iceberg.partition import PartitionView, partition_names
from batchllm_operator.lake.iceberg.publish import (
    Publisher,
    check_own,
    check_takes,
    stored_columns,
)
from batchllm_operator.lake.iceberg.schema import arrow_schema, iceberg_schema, storable_schema
from batchllm_operator.lake.iceberg.staging import IcebergStaging
from batchllm_operator.lake.iceberg.write import check_writer
from batchllm_operator.lake.publishing import check_name
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.lake.table import FilePart, InputFile, Publication, Snapshot, StagedRows
from batchllm_operator.spec import FilterTerm, TableAddress

_VERSION: Final = re.compile(r"iceberg:(none|[0-9]+)/([0-9]+)")  # of the snapshot, of the schema


class IcebergTable:
    """A `LakeTable` in an Iceberg catalog."""

    forbidden_in_names = ""

    def __init__(self, address: TableAddress, partition_column: str, most_file_bytes: int) -> None:
        """The table need not exist yet. `most_file_bytes` bounds new data files.

        Raises:
            SpecError: pyiceberg's configuration has no such catalog.
            StorageError: the catalog can't be reached.
        """
        self._catalog_table = CatalogTable(address)
        self.uri = address.uri
        self.most_file_bytes = most_file_bytes
        self._partition_column = partition_column
        self._last_view: tuple[tuple[str, str], PartitionView] | None = None

    def partitions(self) -> list[str]:
        """Read from metadata, so the table must be partitioned by the column's values."""
        table = self._catalog_table.load()
        return [] if table is None else partition_names(table, self.uri, self._partition_column)

    def snapshot(self, partition: str) -> Snapshot:
        table = self._load()
        view = PartitionView.now(table, self.uri, self._partition_column, partition)
        root, tasks = f"{table.location().rstrip('/')}/", view.tasks()
        snapshot_id = "none" if view.snapshot_id is None else view.snapshot_id
        outer, inner = view.other_values(tasks)
        return Snapshot(
            partition=partition,
            version=f"iceberg:{snapshot_id}/{table.schema().schema_id}",
            files=tuple(
                InputFile(
                    name=task.file.file_path.removeprefix(root),
                    size_bytes=task.file.file_size_in_bytes,
                    num_rows=task.file.record_count,
                    version="immutable",
                )
                for task in tasks
            ),
            schema=view.arrow_schema,
            outer=outer,
            inner=inner,
        )

    def scan(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm] = (),
        part: FilePart | None = None,
    ) -> Iterator[pa.RecordBatch]:
        yield from self._view(snapshot).scan(columns, conditions, part)

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        return self._view(snapshot).footer(file)

    def check_unchanged(self, snapshot: Snapshot) -> None:
        """Snapshots don't change."""

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
            table, self.uri, self._partition_column, snapshot.partition, snapshot_id, schema
        )
        self._last_view = (pinned, view)
        return view

    def published(self, partition: str) -> Publication | None:
        table = self._catalog_table.load()
        if table is None:
            return None
        return PartitionView.now(table, self.uri, self._partition_column, partition).published()

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        where = f"table {self.uri}"
        check_name(self.uri, partition)
        check_own(where, self._partition_column, columns)
        rows = storable_schema(where, columns)
        table = self._catalog_table.load()
        if table is None:
            self._catalog_table.check_create(rows, self._partition_column)
            return stored_columns(self.uri, None, rows)
        view = PartitionView.now(table, self.uri, self._partition_column, partition)
        old = [task.file for task in view.tasks()]
        new = check_takes(table, view, old, rows, add_columns=add_columns)
        with iceberg_errors(self.uri):
            added = iceberg_schema(pa.schema([rows.field(name) for name in new]))
            check_writer(table, Overwrite(table, added).metadata)
        return stored_columns(self.uri, table, rows)

    def staging(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> IcebergStaging:
        self.check_outputs(partition, columns, add_columns=add_columns)
        return IcebergStaging.of(
            self._catalog_table, self._partition_column, partition, columns, self.most_file_bytes
        )

    def publish(
        self,
        publication: Publication,
        data: Path | StagedRows,
        *,
        replaces: Publication | None,
        add_columns: bool = False,
    ) -> None:
        publisher = Publisher(
            self._catalog_table,
            self._partition_column,
            publication,
            data if isinstance(data, StagedRows) else files_of(data),
            self.most_file_bytes,
        )
        publisher.publish(replaces, add_columns=add_columns)

    def _load(self) -> Table:
        table = self._catalog_table.load()
        if table is None:
            raise TableError(
                f"table {self.uri}: the catalog has no such table; check its name, or write the"
                " table first"
            )
        return table
