"""Replaces a partition of an Iceberg table by one snapshot, at most once."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from batchllm_operator.errors import CommitUnknownError, ConflictError, StorageError, TableError
from batchllm_operator.lake.iceberg.catalog import CatalogTable, iceberg_errors, without_secrets
from batchllm_operator.lake.iceberg.commit import NotCommittedError, Overwrite
from batchllm_operator.lake.iceberg.partition import PartitionView
from batchllm_operator.lake.iceberg.schema import arrow_schema, iceberg_schema, storable_schema
from batchllm_operator.lake.iceberg.write import StagedFiles
from batchllm_operator.lake.publishing import check_name, is_published, looking_again, pauses_s
from batchllm_operator.lake.schema import check_cases, check_fit, check_required, check_typed
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.lake.table import Publication, StagedRows

_NEWEST_FORMAT: Final = 2
_ATTEMPTS: Final = 10
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_log = logging.getLogger(__name__)


class Publisher:
    """Publishes one partition, and repeats failed commits.

    Any failure is repeated, some seconds long: only `CommitFailedException` means the same in all
    catalogs. A lost connection, a locked database, a throttled call and a denied one are errors of
    SQLAlchemy, botocore, Thrift or requests, or a status code of a REST catalog, whose server or
    proxy may be at fault for a moment. To repeat is safe, as each commit begins with a look at the
    table, and what never succeeds ends with the last error.

    Data files are written once, unless the schema changes meanwhile. They are removed when no
    snapshot can refer to them, so not while a commit's outcome is unknown.
    """

    def __init__(
        self,
        catalog_table: CatalogTable,
        column: str,
        publication: Publication,
        data: Sequence[Path] | StagedRows,
        most_file_bytes: int,
    ) -> None:
        """`data` are local files of the rows, at least one; `most_file_bytes` bounds new files.

        Or they are staged.
        """
        self._catalog_table = catalog_table
        self._uri = catalog_table.uri
        self._column = column
        self._publication = publication
        self._data = data
        self._most_file_bytes = most_file_bytes
        if isinstance(data, StagedRows):
            self._num_rows = sum(json.loads(file)["record_count"] for file in data.files)
            rows = data.schema
        else:
            footers = [pq.read_metadata(file) for file in data]
            self._num_rows = sum(footer.num_rows for footer in footers)
            rows = footers[0].schema.to_arrow_schema()
        check_own(f"table {self._uri}", column, rows)
        self._rows = storable_schema(f"table {self._uri}", rows)
        self._staged: StagedFiles | None = None
        self._overwrites: list[Overwrite] = []  # all tried; any may be in the table
        self._is_open = False  # whether a commit of the staged files may have happened

    def publish(self, replaces: Publication | None, *, add_columns: bool) -> None:
        """See `LakeTable.publish`."""
        check_name(self._uri, self._publication.partition)
        try:
            failure = self._try(replaces, add_columns)
            for pause_s in pauses_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _ATTEMPTS - 1):
                if failure is None:
                    return
                time.sleep(pause_s)
                failure = self._try(replaces, add_columns)
        finally:
            if self._staged is not None and not self._is_open:
                self._staged.remove()
        if failure is None:
            return
        kind = CommitUnknownError if self._is_open else StorageError
        text, cause = without_secrets(failure, self._uri)
        raise kind(
            f"output {self._uri}: partition {self._publication.partition!r}: gave up after"
            f" {_ATTEMPTS} commits; commit again: {text}"
        ) from cause

    def _try(self, replaces: Publication | None, add_columns: bool) -> Exception | None:
        """Commit once on top of the table as it is; returns None on success, else the failure."""
        with self._looking():
            table = self._catalog_table.load()
            if table is None:
                table = self._catalog_table.create(self._rows, self._column)
            if self._has_happened(table):
                return None
            view = PartitionView.now(table, self._uri, self._column, self._publication.partition)
            found = view.published()
        if found is None and self._num_rows == 0:
            return None
        if is_published(self._uri, found, self._publication, replaces):
            return None
        with iceberg_errors(self._uri):
            overwrite = self._prepare(table, view, add_columns)
        if overwrite is None:
            return None
        was_open, self._is_open = self._is_open, True
        try:
            overwrite.commit()
            return None
        except Exception as error:  # noqa: BLE001 - each catalog has its own; the table says what happened
            failure = error
        with self._looking():
            now = self._catalog_table.load_again()
        if now is not None and self._has_happened(now):
            return None
        if isinstance(failure, NotCommittedError):
            self._is_open = was_open
            overwrite.clean_up()
        text, _ = without_secrets(failure, self._uri)
        _log.warning("%s: not committed, trying again: %s", self._uri, text)
        return failure

    def _looking(self) -> AbstractContextManager[None]:
        return looking_again(self._uri, self._publication.partition, is_open=self._is_open)

    def _has_happened(self, table: Table) -> bool:
        """Whether one of our commits is in the table, whatever its answer was."""
        if not any(overwrite.is_in(table) for overwrite in self._overwrites):
            return False
        _log.info("%s: the answer was lost, but the snapshot is there", self._uri)
        return True

    def _prepare(self, table: Table, view: PartitionView, add_columns: bool) -> Overwrite | None:
        """A commit on top of `table`, with its data files written; None if nothing would change."""
        old = [task.file for task in view.tasks()]
        new_names = check_takes(table, view, old, self._rows, add_columns=add_columns)
        new_columns = pa.schema([self._rows.field(name) for name in new_names])
        overwrite = Overwrite(table, iceberg_schema(new_columns))
        if self._staged is None or self._staged.schema != overwrite.metadata.schema():
            if self._staged is not None and not self._is_open:
                self._staged.remove()
            self._staged = StagedFiles(table, overwrite.metadata, self._column, view.value)
            self._fill(self._staged, table)
        if not old and not self._staged.files:
            return None
        self._overwrites.append(overwrite)
        overwrite.stage(old, self._staged.files, self._publication.properties)
        return overwrite

    def _fill(self, staged: StagedFiles, table: Table) -> None:
        """Write the data files, or refer to those that are there.

        Raises:
            ConflictError: the table has other columns than when those were written.
        """
        if not isinstance(self._data, StagedRows):
            stored = stored_columns(self._uri, table, self._rows)
            staged.write(self._data, stored, self._most_file_bytes)
            return
        if arrow_schema(staged.schema) != self._data.stored:
            raise ConflictError(
                f"output {self._uri}: its columns have changed while the outputs were written;"
                " commit again"
            )
        staged.take(self._data.files)


def check_takes(
    table: Table,
    view: PartitionView,
    old: Sequence[DataFile],
    rows: pa.Schema,
    *,
    add_columns: bool,
) -> list[str]:
    """Names of those columns of `rows` (from `storable_schema`) that the table lacks.

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
    check_required(where, columns, [*rows.names, view.column])
    new = check_fit(where, columns, rows, add_columns=add_columns)
    check_typed(where, [rows.field(name) for name in new])
    return new


def check_own(where: str, column: str, rows: pa.Schema) -> None:
    """Check the rows' columns without looking at the table; `column` is that of partitions.

    Raises:
        TableError: no table can have such columns.
    """
    if column in rows.names:
        raise TableError(f"{where}: the rows have the partition column {column!r} themselves")
    check_cases(where, [column, *rows.names])


def stored_columns(uri: str, table: Table | None, rows: pa.Schema) -> StoredColumns:
    """The columns of `rows` (from `storable_schema`) in the table, or in a new one."""
    held = {} if table is None else {field.name: field for field in table.schema().fields}
    fields = [
        field.with_nullable(field.name not in held or not held[field.name].required)
        for field in rows
    ]
    return StoredColumns(f"output {uri}", pa.schema(fields), has_calendar=True)
