"""Delta tables on local disk or S3, partitioned by one column (ADR 18).

A partition's new files are put beside the old ones; one commit then adds the new and removes the
old. Files that a commit may refer to are never removed: those of a refused commit are left to the
table's vacuum.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset as pds

from batchllm_operator.errors import TableError
from batchllm_operator.lake.delta.data import DeltaStaging, OutputFiles
from batchllm_operator.lake.delta.log import CommitRefusedError, DeltaLog
from batchllm_operator.lake.delta.schema import FORBIDDEN_IN_NAMES, accepted
from batchllm_operator.lake.delta.version import DataFile, TableVersion
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.lake.publishing import (
    RUN_ID,
    Publication,
    RefusedCommit,
    StagedRows,
    looking_again,
    publisher_in,
)
from batchllm_operator.lake.scanning import may_hold
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.lake.table import FilePart, FolderTable, InputFile, Snapshot
from batchllm_operator.spec import TARGET_FILE_BYTES, FilterTerm, TableAddress
from batchllm_operator.storage.conditional_writes import check_conditional_writes
from batchllm_operator.storage.folder import Folder

_VERSION_PREFIX: Final = "delta:"


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> DeltaTable:
    return DeltaTable(address.location, partition_column, most_file_bytes)


class DeltaTable(FolderTable):
    """A Delta table; its partition column holds strings, integers or dates."""

    forbidden_in_names = FORBIDDEN_IN_NAMES
    most_file_bytes: int

    def __init__(
        self, uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
    ) -> None:
        """`uri` is a local path or an `s3://` URI; `most_file_bytes` bounds new data files.

        Raises:
            SpecError: a Delta table can't be there.
            ModuleNotFoundError: deltalake isn't installed.
        """
        folder = Folder.open(uri)
        self._log = DeltaLog(folder)
        super().__init__(folder, self._log.uri, partition_column, most_file_bytes)
        self._last_files: tuple[tuple[str, str], dict[str, DataFile]] = (("", ""), {})

    def partitions(self) -> list[str]:
        """Partitions with files. Rows where the column is null are in none."""
        version = self._log.latest()
        if version is None:
            return []
        self._check_partitioning(version)
        values = {file.partition_values[self.partition_column] for file in version.files()}
        return in_order(str(value) for value in values if value is not None)

    def snapshot(self, partition: str) -> Snapshot:
        version = self._log.latest()
        if version is None:
            raise TableError(
                f"table {self.uri}: there is no Delta table (no _delta_log); check the address, or"
                " write the table first"
            )
        files = self._files_of(version, partition)
        return Snapshot.of(
            partition,
            f"{_VERSION_PREFIX}{version.number}",
            list(map(self._input_file, files)),
            version.schema,
            self.partition_column,
            [
                {column: str(file.partition_values[column]) for column in version.partition_columns}
                for file in files
            ],
        )

    def _batches(
        self,
        snapshot: Snapshot,
        schema: pa.Schema,
        conditions: Sequence[FilterTerm],
        condition: pds.Expression | None,
        part: FilePart | None,
    ) -> Iterator[pa.RecordBatch]:
        files = self._pinned(snapshot) if part is None else [self._file_of(snapshot, part)]
        for file in files:
            if all(may_hold(term, file.lowest, file.highest, schema) for term in conditions):
                name, values = file.name, file.partition_values
                yield from self._read(snapshot.partition, name, schema, values, condition, part)

    def published(self, partition: str) -> Publication | None:
        return self._published_in(self._log.latest(), partition)

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        check_conditional_writes(self._folder, "IfNoneMatch")
        seen = self._log.latest()
        place = (self.partition_column, partition)
        stored, new = accepted(self._folder, seen, place, columns, add_columns=add_columns)
        held = seen is not None and bool(self._files_of(seen, partition))
        try:
            self._log.rehearse(seen, place, new, replaces=held)
        except CommitRefusedError as error:
            raise self._refusal(error).error(self.uri, partition) from None
        return StoredColumns(f"output {self.uri}", stored, has_calendar=False)

    def staging(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> DeltaStaging:
        return DeltaStaging(
            uri=self.uri,
            schema=columns,
            stored=self.check_outputs(partition, columns, add_columns=add_columns).schema,
            folder_uri=self._folder.uri,
            subfolder=self._subfolder(partition),
            partition_values={self.partition_column: partition},
            most_file_bytes=self.most_file_bytes,
            write_id=uuid.uuid4().hex,
        )

    def _subfolder(self, partition: str) -> str:
        return f"{quote(self.partition_column, safe='')}={quote(partition, safe='')}"

    @contextmanager
    def _attempt(
        self, publication: Publication, data: Path | StagedRows, add_columns: bool
    ) -> Iterator[_Commit]:
        check_conditional_writes(self._folder, "IfNoneMatch")
        subfolder = self._subfolder(publication.partition)
        rows = OutputFiles(self._folder, subfolder, data, self.most_file_bytes)
        try:
            yield _Commit(self, publication, rows, add_columns)
        finally:
            rows.remove()

    def _refusal(self, error: CommitRefusedError) -> RefusedCommit:
        """A commit that was refused without a concurrent commit."""
        if error.is_storage:  # on S3 the request may still arrive
            may_arrive = not self._folder.is_local
            return RefusedCommit(str(error), may_arrive=may_arrive, may_repeat=False)
        text = (
            f"deltalake can't write such a version of the table: {error}; drop what it lacks from"
            " the table, or choose another output table"
        )
        return RefusedCommit(text, may_repeat=False, kind=TableError)

    def _published_in(self, version: TableVersion | None, partition: str) -> Publication | None:
        """The publication that the partition holds in this version; see `publisher_in`."""
        if version is None:
            return None
        files = self._files_of(version, partition)
        names = [RUN_ID] if RUN_ID in version.schema.names else []
        schema = pa.schema([version.schema.field(name) for name in names])
        rows = (
            batch
            for file in files
            for batch in self._read(partition, file.name, schema, file.partition_values, None, None)
        )
        return publisher_in(self.uri, partition, version.schema, rows)

    def _input_file(self, file: DataFile) -> InputFile:
        num_rows = file.num_rows
        if num_rows is None:  # not every writer stores it
            num_rows = read_footer(self._folder, file.name, file.size_bytes)[0].num_rows
        return InputFile(file.name, file.size_bytes, num_rows, f"modified:{file.modified_ms}")

    def _files_of(self, version: TableVersion, partition: str) -> list[DataFile]:
        self._check_partitioning(version)
        value = version.partition_value(self.partition_column, partition)
        if value is None:
            return []
        column = self.partition_column
        chosen = [file for file in version.files() if file.partition_values[column] == value]
        for file in chosen:
            if "://" in file.name or file.name.startswith("/") or ".." in file.name.split("/"):
                raise TableError(
                    f"table {self.uri}: refers to a file outside of its folder, {file.name!r}, as"
                    " shallow clones do; copy it to a table of its own"
                )
        return sorted(chosen, key=lambda file: file.name)

    def _pinned(self, snapshot: Snapshot) -> list[DataFile]:
        files = self._files_of(self._version_of(snapshot), snapshot.partition)
        if [file.name for file in files] != [file.name for file in snapshot.files]:
            raise TableError(
                f"table {self.uri}: is another one than when {snapshot.version} was looked at; plan"
                " again"
            )
        return files

    def _file_of(self, snapshot: Snapshot, part: FilePart) -> DataFile:
        """A part's file; the files of the last snapshot are kept, for scans of many parts."""
        pinned = (snapshot.version, snapshot.partition)
        if self._last_files[0] != pinned:
            files = self._files_of(self._version_of(snapshot), snapshot.partition)
            self._last_files = (pinned, {file.name: file for file in files})
        file = self._last_files[1].get(part.file.name)
        if file is None:
            raise TableError(f"table {self.uri}: {snapshot.version} has no file {part.file.name!r}")
        return file

    def _version_of(self, snapshot: Snapshot) -> TableVersion:
        number = snapshot.version.removeprefix(_VERSION_PREFIX)
        if number == snapshot.version or not number.isdecimal():
            raise TableError(f"table {self.uri}: {snapshot.version!r} is no version of Delta")
        return self._log.at(int(number))

    def _check_partitioning(self, version: TableVersion) -> None:
        if self.partition_column not in version.partition_columns:
            raise TableError(
                f"table {self.uri}: isn't partitioned by {self.partition_column!r}, but by"
                f" {', '.join(version.partition_columns) or 'no column'}"
            )


class _Commit:
    """See `Attempt`: writes the version after the one that was looked at."""

    def __init__(
        self, table: DeltaTable, publication: Publication, rows: OutputFiles, add_columns: bool
    ) -> None:
        self._table, self._publication, self._rows = table, publication, rows
        self._add_columns = add_columns
        self._seen: TableVersion | None = None

    def look(self) -> Publication | None:
        self._seen = self._table._log.latest()
        return self._table._published_in(self._seen, self._publication.partition)

    def commit(self) -> RefusedCommit | None:
        table, seen, rows = self._table, self._seen, self._rows
        place = (table.partition_column, self._publication.partition)
        stored, new = accepted(
            table._folder, seen, place, rows.schema, add_columns=self._add_columns
        )
        files = rows.put(table.uri, stored, dict([place]))
        if not (seen is None or files or new or table._files_of(seen, place[1])):
            return None
        # Even if it is refused: delta-rs repeats requests, and its own first one may have landed.
        rows.may_be_committed = True
        try:
            table._log.commit(seen, place, files, new, self._publication.properties)
        except CommitRefusedError as error:
            with looking_again(table.uri, place[1]):
                now = table._log.latest()
            if (now and now.number) == (seen and seen.number):
                return table._refusal(error)
            return RefusedCommit("another commit to the table came first")
        return None
