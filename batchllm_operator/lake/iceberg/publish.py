"""Replaces a partition of an Iceberg table by one snapshot, at most once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AssertTableUUID

from batchllm_operator.errors import TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors, without_secrets
from batchllm_operator.lake.iceberg.partition import PartitionView
from batchllm_operator.lake.iceberg.schema import arrow_schema, iceberg_schema, storable_schema
from batchllm_operator.lake.iceberg.write import StagedFiles
from batchllm_operator.lake.publishing import Publication, RefusedCommit, StagedRows, looking_again
from batchllm_operator.lake.schema import check_own, check_takes
from batchllm_operator.lake.stored_columns import StoredColumns

_NEWEST_FORMAT: Final = 2


class Overwrite:
    """A transaction on a table as it was loaded, without pyiceberg's own retries.

    Those would repeat the commit on top of unseen changes.
    """

    def __init__(self, table: Table, rows: pa.Schema) -> None:
        """Columns of `rows` (from `storable_schema`) that the table lacks are added to it."""
        self._table = table
        self._transaction: Transaction = table.transaction()
        self._producer: Any = None
        has = {field.name for field in table.schema().fields}
        if new := [field for field in rows if field.name not in has]:
            with self._transaction.update_schema() as update:
                update.union_by_name(iceberg_schema(pa.schema(new)))

    @property
    def metadata(self) -> TableMetadata:
        """The table's metadata with the new columns."""
        return self._transaction.table_metadata

    def stage(
        self,
        old_files: Sequence[DataFile],
        new_files: Sequence[DataFile],
        properties: Mapping[str, str],
    ) -> None:
        snapshot = self._transaction.update_snapshot(snapshot_properties=dict(properties))
        self._producer = snapshot.overwrite()
        for file in old_files:
            self._producer.delete_data_file(file)
        for file in new_files:
            self._producer.append_data_file(file)
        self._producer.commit()  # into the transaction

    def commit(self) -> None:
        """Commit what is staged.

        Raises:
            CommitFailedException: the branch has moved since the table was loaded.
            Exception: anything that pyiceberg and its catalogs raise; the commit may have happened.
        """
        staged = self._transaction
        requirements = (*staged._requirements, AssertTableUUID(uuid=self.metadata.table_uuid))
        self._table._do_commit(updates=staged._updates, requirements=requirements)

    def is_in(self, table: Table) -> bool:
        """Whether the reloaded table has the snapshot."""
        snapshot_id = self._producer.snapshot_id
        return snapshot_id is not None and table.metadata.snapshot_by_id(snapshot_id) is not None

    def clean_up(self) -> None:
        """Remove the written manifests. Only if the commit certainly hasn't happened."""
        self._producer._clean_all_uncommitted()


class Publisher:
    """See `Attempt`.

    Any failure may be repeated: only `CommitFailedException` means the same in all catalogs. A lost
    connection, a locked database, a throttled call and a denied one are errors of SQLAlchemy,
    botocore, Thrift or requests, or a status code of a REST catalog, whose server or proxy may be
    at fault for a moment. To repeat is safe, as the table is looked at before each commit, and what
    never succeeds ends with the last error.

    Data files are written once, unless the schema changes meanwhile. They are removed when no
    snapshot can refer to them, so not while a commit's outcome is unknown.
    """

    def __init__(
        self,
        catalog_table: CatalogTable,
        column: str,
        publication: Publication,
        data: Path | StagedRows,
        most_file_bytes: int,
        *,
        add_columns: bool,
    ) -> None:
        """`column` is the table's partition column; otherwise see `LakeTable.publish`."""
        self._catalog_table, self._uri = catalog_table, catalog_table.uri
        self._column, self._publication, self._data = column, publication, data
        self._most_file_bytes, self._add_columns = most_file_bytes, add_columns
        rows = data.schema if isinstance(data, StagedRows) else pq.read_schema(files_of(data)[0])
        check_own(f"table {self._uri}", column, rows)
        self._rows = storable_schema(f"table {self._uri}", rows)
        self._staged: StagedFiles | None = None
        self._overwrites: list[Overwrite] = []  # all tried; any may be in the table
        self._is_open = False  # whether a commit of the staged files may have happened

    def look(self) -> Publication | None:
        loaded = self._catalog_table.load()
        self._table = loaded or self._catalog_table.create(self._rows, self._column)
        if self._has_happened(self._table):
            return self._publication
        partition = self._publication.partition
        self._view = PartitionView.now(self._table, self._uri, self._column, partition)
        return self._view.published()

    def commit(self) -> RefusedCommit | None:
        with iceberg_errors(self._uri):
            overwrite = self._prepare()
        if overwrite is None:
            return None
        was_open, self._is_open = self._is_open, True
        try:
            overwrite.commit()
            return None
        except Exception as error:  # noqa: BLE001 - each catalog has its own; the table says what happened
            failure = error
        with looking_again(self._uri, self._publication.partition):
            now = self._catalog_table.load_again()
        if now is not None and self._has_happened(now):
            return None
        if isinstance(failure, CommitFailedException):
            self._is_open = was_open
            overwrite.clean_up()
        text, cause = without_secrets(failure, self._uri)
        return RefusedCommit(text, cause, may_arrive=self._is_open)

    def close(self) -> None:
        """Remove the data files, unless a snapshot may refer to them."""
        if self._staged is not None and not self._is_open:
            self._staged.remove()

    def _has_happened(self, table: Table) -> bool:
        """Whether one of our commits is in the table, whatever its answer was."""
        return any(overwrite.is_in(table) for overwrite in self._overwrites)

    def _prepare(self) -> Overwrite | None:
        """A commit on top of the table, with its data files written; None if it changed nothing.

        Raises:
            ConflictError: the table has other columns than when staged rows were written.
        """
        table, view = self._table, self._view
        old = [task.file for task in view.tasks()]
        check_replace(table, view, old, self._rows, add_columns=self._add_columns)
        overwrite = Overwrite(table, self._rows)
        if self._staged is None or self._staged.schema != overwrite.metadata.schema():
            self.close()
            self._staged = StagedFiles(table, overwrite.metadata, self._column, view.value)
            if isinstance(self._data, StagedRows):
                self._data.check_stored(self._uri, arrow_schema(self._staged.schema))
                self._staged.take(self._data.files)
            else:
                stored = stored_columns(self._uri, table, self._rows)
                self._staged.write(files_of(self._data), stored, self._most_file_bytes)
        if not old and not self._staged.files:
            return None
        self._overwrites.append(overwrite)
        overwrite.stage(old, self._staged.files, self._publication.properties)
        return overwrite


def check_replace(
    table: Table,
    view: PartitionView,
    old: Sequence[DataFile],
    rows: pa.Schema,
    *,
    add_columns: bool,
) -> None:
    """Check that `rows` (from `storable_schema`) can replace the partition.

    `view` is the partition's newest state, and `old` are its files.

    Raises:
        TableError: such rows can't replace the partition.
    """
    where = f"table {view.uri}"
    if table.format_version > _NEWEST_FORMAT:
        raise TableError(
            f"{where}: has format version {table.format_version}, which pyiceberg can't write;"
            " choose another output table"
        )
    if len(table.spec().fields) != 1 or not view.is_identity(table.spec()):
        raise TableError(
            f"{where}: outputs go to tables partitioned by the values of"
            f" {view.column!r} alone; this one has {table.spec()}"
        )
    if not all(map(view.is_whole, old)):
        raise TableError(
            f"{where}: partition {view.partition!r} has files from before the table was"
            f" partitioned by {view.column!r}; rewrite them first"
        )
    columns = schema_to_pyarrow(table.schema())
    check_takes(where, columns, view.column, rows, add_columns=add_columns)


def stored_columns(uri: str, table: Table | None, rows: pa.Schema) -> StoredColumns:
    """The columns of `rows` (from `storable_schema`) in the table, or in a new one."""
    held = {} if table is None else {field.name: field for field in table.schema().fields}
    fields = [
        field.with_nullable(field.name not in held or not held[field.name].required)
        for field in rows
    ]
    return StoredColumns(f"output {uri}", pa.schema(fields), has_calendar=True)
