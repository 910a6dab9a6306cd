"""Delta tables on local disk or S3, partitioned by one column (ADR 18).

A partition's new files are put beside the old ones; one commit then adds the new and removes the
old. Files that a commit may refer to are never removed: those of a refused commit are left to the
table's vacuum.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import BatchLLMError, CommitUnknownError, StorageError, TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.delta.data import (
    FORBIDDEN_IN_NAMES,
    OutputFiles,
    accepted,
    stored_schema,
)
from batchllm_operator.lake.delta.log import CommitRefusedError, DeltaLog
from batchllm_operator.lake.delta.staging import DeltaStaging, StagedOutputs
from batchllm_operator.lake.delta.version import DataFile, TableVersion, may_hold
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order, in_orders
from batchllm_operator.lake.publishing import (
    RUN_ID,
    check_name,
    is_published,
    looking_again,
    pauses_s,
    publisher_in,
)
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.lake.scanning import check_columns, reading, row_condition
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.lake.table import FilePart, InputFile, Publication, Snapshot, StagedRows
from batchllm_operator.spec import TARGET_FILE_BYTES, FilterTerm
from batchllm_operator.storage.conditional_writes import check_conditional_writes
from batchllm_operator.storage.folder import Folder

_VERSION_PREFIX: Final = "delta:"
_ATTEMPTS: Final = 20  # while others commit to other partitions
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0


class DeltaTable:
    """A Delta table; its partition column holds strings, integers or dates."""

    forbidden_in_names = FORBIDDEN_IN_NAMES

    def __init__(
        self, uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
    ) -> None:
        """`uri` is a local path or an `s3://` URI; `most_file_bytes` bounds new data files.

        Raises:
            SpecError: a Delta table can't be there.
            MissingLibraryError: deltalake isn't installed.
        """
        self._folder = Folder.open(uri)
        self._log = DeltaLog(self._folder)
        self.uri = self._log.uri
        self.most_file_bytes = most_file_bytes
        self._partition_column = partition_column
        self._files_at: tuple[tuple[str, str], dict[str, DataFile]] = (("", ""), {})

    def partitions(self) -> list[str]:
        """Partitions with files. Rows where the column is null are in none."""
        version = self._log.latest()
        if version is None:
            return []
        self._check_partitioning(version)
        found = {file.partition_values[self._partition_column] for file in version.files()}
        return in_order(str(value) for value in found if value is not None)

    def snapshot(self, partition: str) -> Snapshot:
        version = self._log.latest()
        if version is None:
            raise TableError(
                f"table {self.uri}: there is no Delta table (no _delta_log); check the address, or"
                " write the table first"
            )
        return self._snapshot_of(version, partition)

    def scan(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm] = (),
        part: FilePart | None = None,
    ) -> Iterator[pa.RecordBatch]:
        check_columns(self.uri, snapshot.schema, columns, conditions)
        if part is None:
            yield from self._rows(snapshot, self._pinned(snapshot), columns, conditions)
            return
        pinned = (snapshot.version, snapshot.partition)
        if self._files_at[0] != pinned:  # one version of a table with many files
            files = self._files_of(self._version_of(snapshot), snapshot.partition)
            self._files_at = (pinned, {file.name: file for file in files})
        file = self._files_at[1].get(part.file.name)
        if file is None:
            raise TableError(f"table {self.uri}: {snapshot.version} has no file {part.file.name!r}")
        yield from self._rows(snapshot, [file], columns, conditions, part.row_groups)

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        with reading(self.uri, snapshot.partition, file.name):
            return read_footer(self._folder, file.name, file.size_bytes)[0]

    def check_unchanged(self, snapshot: Snapshot) -> None:
        """Versions don't change."""

    def published(self, partition: str) -> Publication | None:
        return self._look(partition)[1]

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        check_conditional_writes(self._folder, "IfNoneMatch")
        seen = self._log.latest()
        place = (self._partition_column, partition)
        columns, new = accepted(self._folder, seen, place, columns, add_columns=add_columns)
        held = seen is not None and bool(self._files_of(seen, partition))
        try:
            self._log.rehearse(seen, place, new, replaces=held)
        except CommitRefusedError as refusal:
            raise self._failure(refusal, partition) from None
        stored = stored_schema(seen, columns, new)
        return StoredColumns(f"output {self.uri}", stored, has_calendar=False)

    def staging(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> DeltaStaging:
        stored = self.check_outputs(partition, columns, add_columns=add_columns).schema
        values = {self._partition_column: partition}
        place = (self.uri, self._folder.uri, self._subfolder(partition))
        most, write_id = self.most_file_bytes, uuid.uuid4().hex
        return DeltaStaging(*place, columns, stored, values, most, write_id)

    def _subfolder(self, partition: str) -> str:
        return f"{quote(self._partition_column, safe='')}={quote(partition, safe='')}"

    def publish(
        self,
        publication: Publication,
        data: Path | StagedRows,
        *,
        replaces: Publication | None,
        add_columns: bool = False,
    ) -> None:
        partition = publication.partition
        check_name(self.uri, partition)
        check_conditional_writes(self._folder, "IfNoneMatch")
        rows: OutputFiles | StagedOutputs
        if isinstance(data, StagedRows):
            rows = StagedOutputs(data)
        else:
            subfolder = self._subfolder(partition)
            rows = OutputFiles(self._folder, subfolder, files_of(data), self.most_file_bytes)
        try:
            self._publish(publication, rows, replaces, add_columns)
        finally:
            rows.remove()

    def _publish(
        self,
        publication: Publication,
        rows: OutputFiles | StagedOutputs,
        replaces: Publication | None,
        add_columns: bool,
    ) -> None:
        partition = publication.partition
        pauses = pauses_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _ATTEMPTS - 1)
        seen, found = self._look(partition)
        while not is_published(self.uri, found, publication, replaces):
            try:
                self._commit(seen, publication, rows, add_columns)
                return
            except CommitRefusedError as error:
                refusal = error
            tried = seen
            with looking_again(self.uri, partition):
                seen, found = self._look(partition)
            if _number(seen) == _number(tried):
                raise self._failure(refusal, partition)
            # Another commit came first, in any partition, or ours did without an answer.
            if (pause_s := next(pauses, None)) is None:
                raise StorageError(
                    f"output {self.uri}: partition {partition!r} wasn't published: another commit"
                    " to the table always came first; commit again"
                )
            time.sleep(pause_s)

    def _failure(self, refusal: CommitRefusedError, partition: str) -> BatchLLMError:
        """The error for a commit that was refused without a concurrent commit."""
        where = f"output {self.uri}: partition {partition!r} wasn't published"
        if not refusal.is_storage:
            return TableError(
                f"{where}: deltalake can't write such a version of the table: {refusal}; drop what"
                " it lacks from the table, or choose another output table"
            )
        if self._folder.is_local:
            return StorageError(f"{where}: {refusal}")
        return CommitUnknownError(  # the request may still arrive
            f"output {self.uri}: no answer came whether partition {partition!r} was published;"
            f" commit again to find out: {refusal}"
        )

    def _look(self, partition: str) -> tuple[TableVersion | None, Publication | None]:
        """The table's latest version, and the publication that the partition holds in it."""
        version = self._log.latest()
        return version, None if version is None else self._published_in(version, partition)

    def _commit(
        self,
        seen: TableVersion | None,
        publication: Publication,
        rows: OutputFiles | StagedOutputs,
        add_columns: bool,
    ) -> None:
        """Write the version after `seen`.

        Raises:
            CommitRefusedError: it wasn't written, as far as is known.
            TableError: the table doesn't accept the rows.
            StorageError: the files can't be written.
        """
        where, place = f"output {self.uri}", (self._partition_column, publication.partition)
        columns, new = accepted(self._folder, seen, place, rows.schema, add_columns=add_columns)
        files = rows.put(where, stored_schema(seen, columns, new), dict([place]))
        if not (seen is None or files or new or self._files_of(seen, place[1])):
            return
        # Even if it is refused: delta-rs repeats requests, and its own first one may have landed.
        rows.may_be_committed = True
        self._log.commit(seen, place, files, new, publication.properties)

    def _rows(
        self,
        snapshot: Snapshot,
        files: Sequence[DataFile],
        columns: Sequence[str],
        conditions: Sequence[FilterTerm],
        row_groups: tuple[int, int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        wanted = dict.fromkeys([*columns, *(term.column for term in conditions)])
        schema = pa.schema([snapshot.schema.field(name) for name in wanted])
        with reading(self.uri, snapshot.partition):
            condition = row_condition(self.uri, conditions, schema) if files else None
        for file in files:
            if not all(may_hold(term, file, schema) for term in conditions):
                continue
            with reading(self.uri, snapshot.partition, file.name):
                try:
                    with self._folder.open_file(file.name, read_ahead=False) as source:
                        values = file.partition_values
                        for batch in read_batches(source, schema, values, condition, row_groups):
                            yield batch.select(list(columns))
                except FileNotFoundError as error:
                    raise TableError(
                        f"table {self.uri}: partition {snapshot.partition!r} is gone as it was in"
                        f" version {snapshot.version}: {file.name} vanished, as after a vacuum;"
                        " plan again"
                    ) from error

    def _published_in(self, version: TableVersion, partition: str) -> Publication | None:
        """The publication that the partition holds in this version; see `publisher_in`."""
        files = self._files_of(version, partition)
        if not files:
            return None
        columns = [RUN_ID] if RUN_ID in version.schema.names else []
        rows = self._rows(self._snapshot_of(version, partition), files, columns, ())
        return publisher_in(self.uri, partition, version.schema, rows)

    def _snapshot_of(self, version: TableVersion, partition: str) -> Snapshot:
        files = self._files_of(version, partition)
        columns = version.partition_columns
        place = columns.index(self._partition_column)
        values = {
            column: {str(file.partition_values[column]) for file in files} for column in columns
        }
        return Snapshot(
            partition=partition,
            version=f"{_VERSION_PREFIX}{version.number}",
            files=tuple(map(self._input_file, files)),
            schema=version.schema,
            outer=in_orders({column: values[column] for column in columns[:place]}),
            inner=in_orders({column: values[column] for column in columns[place + 1 :]}),
        )

    def _input_file(self, file: DataFile) -> InputFile:
        num_rows = file.num_rows
        if num_rows is None:  # not every writer stores it
            num_rows = read_footer(self._folder, file.name, file.size_bytes)[0].num_rows
        return InputFile(file.name, file.size_bytes, num_rows, f"modified:{file.modified_ms}")

    def _files_of(self, version: TableVersion, partition: str) -> list[DataFile]:
        self._check_partitioning(version)
        value = version.partition_value(self._partition_column, partition)
        if value is None:
            return []
        column = self._partition_column
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

    def _version_of(self, snapshot: Snapshot) -> TableVersion:
        number = snapshot.version.removeprefix(_VERSION_PREFIX)
        if number == snapshot.version or not number.isdecimal():
            raise TableError(f"table {self.uri}: {snapshot.version!r} is no version of Delta")
        return self._log.at(int(number))

    def _check_partitioning(self, version: TableVersion) -> None:
        if self._partition_column not in version.partition_columns:
            raise TableError(
                f"table {self.uri}: isn't partitioned by {self._partition_column!r}, but by"
                f" {', '.join(version.partition_columns) or 'no column'}"
            )


def _number(version: TableVersion | None) -> int | None:
    return None if version is None else version.number
