"""Iceberg tables of any catalog that pyiceberg knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from batchllm_operator.errors import TableError
from batchllm_operator.lake.iceberg.branch import branch_name, fast_forward
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors
from batchllm_operator.lake.iceberg.partition import Partition, partition_names, root_of
from batchllm_operator.lake.iceberg.read import opened, read_file
from batchllm_operator.lake.iceberg.replacement import Replacement
from batchllm_operator.lake.iceberg.schema import ICEBERG, arrow_schema
from batchllm_operator.lake.places import as_text
from batchllm_operator.lake.publishing import Publication, check_name
from batchllm_operator.lake.scanning import Scan, reading
from batchllm_operator.lake.schema import StoredColumns, fit_columns
from batchllm_operator.lake.staging import StagedRows
from batchllm_operator.lake.table import FilePart, InputFile, Snapshot
from batchllm_operator.lake.versioned import VersionedTable
from batchllm_operator.spec import TableAddress

_VERSION: Final = re.compile(r"iceberg:(none|[0-9]+)/([0-9]+)")  # of the snapshot, of the schema


class IcebergTable(VersionedTable[Table]):
    """A table in an Iceberg catalog."""

    def __init__(self, address: TableAddress, partition_column: str, most_file_bytes: int) -> None:
        super().__init__(address.uri, partition_column, most_file_bytes)
        self._catalog = CatalogTable(address)
        self._read_from: tuple[str, Table, Schema] | None = None
        self._branch: str | None = None

    def partitions(self) -> list[str]:
        """Read from metadata: those of a file with rows of several are left out."""
        table = self._catalog.load()
        return [] if table is None else partition_names(table, self.uri, self.partition_column)

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        table, _ = self._at(snapshot)
        with (
            self._reading(snapshot.partition, file.name),
            opened(table.io, _path(table, file)) as source,
        ):
            return pq.read_metadata(source)

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        if self._catalog.load() is not None:
            return super().check_outputs(partition, columns, add_columns=add_columns)
        check_name(self.uri, partition)
        stored, new = self._fit_new(columns)
        self._catalog.check_create(new, self.partition_column)
        return stored

    def _latest(self) -> Table | None:
        return self._catalog.load()

    def _create(self, columns: pa.Schema) -> Table:
        return self._catalog.create(self._fit_new(columns)[1], self.partition_column)

    def _fit_new(self, columns: pa.Schema) -> tuple[StoredColumns, pa.Schema]:
        """The columns of a new table."""
        where, column = f"output {self.uri}", self.partition_column
        return fit_columns(where, column, columns, None, ICEBERG, add_columns=True)

    def _pin(self, version: Table, partition: str) -> Snapshot:
        snapshot = self._partition(version, partition).snapshot()
        self._read_from = snapshot.version, version, version.schema()
        return snapshot

    def _partition(self, table: Table, partition: str) -> Partition:
        return Partition(table, self.uri, self.partition_column, partition, self.time_zone)

    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        table, schema = self._at(snapshot)
        wanted = Schema(*map(schema.find_field, scan.schema.names))
        for batch in read_file(table, _path(table, file), file, wanted, part):
            chosen = batch if scan.condition is None else batch.filter(scan.condition)
            if chosen.num_rows:
                yield chosen

    def _at(self, snapshot: Snapshot) -> tuple[Table, Schema]:
        """The table, and its schema in a snapshot; the last ones are kept, for many files."""
        last = self._read_from
        if last is None or last[0] != snapshot.version:
            last = self._read_from = snapshot.version, *self._loaded(snapshot)
        return last[1:]

    def _loaded(self, snapshot: Snapshot) -> tuple[Table, Schema]:
        """See `_at`."""
        where = f"table {self.uri}: snapshot {snapshot.version}"
        table, known = self._catalog.load(), _VERSION.fullmatch(snapshot.version)
        if known is None:
            raise TableError(f"{where} isn't one of an Iceberg table")
        if table is None or (
            known[1] != "none" and table.metadata.snapshot_by_id(int(known[1])) is None
        ):
            raise TableError(
                f"{where} is gone: it was expired; keep snapshots for as long as jobs read"
            )
        # Names may mean other columns in the table's newest schema.
        schema = table.schemas().get(int(known[2]))
        if schema is None or as_text(arrow_schema(schema)) != as_text(snapshot.schema):
            raise TableError(f"{where}: its schema is gone from the table's metadata")
        return table, schema

    @contextmanager
    def _reading(self, partition: str, file: str) -> Iterator[None]:
        # `reading` is the inner one: errors that it lets through are pyiceberg's.
        with iceberg_errors(self.uri), reading(self.uri, partition, file):
            yield

    def _change(
        self, version: Table | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        assert version is not None, "it is created before rows are published"
        most, place = self.most_file_bytes, self._partition(version, partition)
        return Replacement(
            self._catalog, place, columns, most, add_columns=add_columns, branch=self._branch
        )

    def publish_branch(
        self, publication: Publication, data: Path | StagedRows, *, add_columns: bool
    ) -> str:
        branch = _Branch(self, publication)
        branch.publish(publication, data, replaces=None, add_columns=add_columns)
        return branch_name(publication)

    def promote(self, publication: Publication) -> bool:
        table = self._catalog.load()
        try:
            with iceberg_errors(self.uri, faults=(), passing=(CommitFailedException,)):
                return table is not None and fast_forward(table, branch_name(publication))
        except CommitFailedException:
            return False


class _Branch(IcebergTable):
    """A publication's branch; it is published if there is one."""

    def __init__(self, table: IcebergTable, publication: Publication) -> None:
        address = TableAddress.parse(table.uri)
        super().__init__(address, table.partition_column, table.most_file_bytes)
        self._publication, self._branch = publication, branch_name(publication)

    def _published_in(self, version: Table | None, partition: str) -> Publication | None:
        is_there = version is not None and self._branch in version.metadata.refs
        return self._publication if is_there else None

    def _change(
        self, version: Table | None, partition: str, columns: pa.Schema, *, add_columns: bool
    ) -> Replacement:
        if version is not None and version.current_snapshot() is None:
            with iceberg_errors(self.uri):  # a branch begins at a snapshot
                version.append(schema_to_pyarrow(version.schema()).empty_table())
        return super()._change(version, partition, columns, add_columns=add_columns)


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> IcebergTable:
    """The table at an address of this format; `open_table` finds this function by its name."""
    return IcebergTable(address, partition_column, most_file_bytes)


def _path(table: Table, file: InputFile) -> str:
    is_whole = file.name.startswith("/") or "://" in file.name
    return file.name if is_whole else f"{root_of(table)}{file.name}"
