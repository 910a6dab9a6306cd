"""The interface of a lake table, what its formats have in common, and opening one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.errors import MissingLibraryError, SpecError, TableError
from batchllm_operator.lake.parquet_footer import read_footer
from batchllm_operator.lake.partition_order import in_order
from batchllm_operator.lake.places import as_text
from batchllm_operator.lake.publishing import (
    RUN_ID,
    Attempt,
    Publication,
    check_name,
    publish_once,
)
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.lake.scanning import Scan, reading
from batchllm_operator.lake.schema import StoredColumns
from batchllm_operator.lake.staging import StagedRows
from batchllm_operator.spec import TARGET_FILE_BYTES, FilterTerm, TableAddress
from batchllm_operator.storage import Folder


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a snapshot."""

    name: str
    """Path relative to the table's root."""
    size_bytes: int
    num_rows: int
    version: str = ""
    """Changes with the content, where files may be replaced: an ETag, or a digest of the footer."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of partition columns that all its rows have, in the order of the table's layout; None
    is null."""
    lowest: Mapping[str, Any] = field(default_factory=dict)
    """Lower bounds of values, by column. Columns may be missing."""
    highest: Mapping[str, Any] = field(default_factory=dict)
    deletes: tuple[tuple[str, str], ...] = ()
    """Paths and formats of the files that name its deleted rows."""
    deleted: str = ""
    """Its deleted rows, where the table's library names them: compressed bits, in base 64."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Neighbouring row groups of a snapshot's file."""

    file: InputFile
    row_groups: tuple[int, int] | None = None
    """Half-open; None for the whole file."""
    size_bytes: int = 0
    """About their size in the file."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One partition at one version of its table."""

    partition: str
    version: str
    """The table's state: `iceberg:<snapshot id>/<schema id>` (`iceberg:none/...` before the first
    snapshot), `delta:<version>` or `listing:<digest>`; a plan records it. Equal versions have equal
    content."""
    files: tuple[InputFile, ...]
    schema: pa.Schema
    """Columns of the partition, including the partition columns."""
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the table's other partition columns in the partition's files: `year` and `month`
    where the partition is a `day`."""
    in_files: pa.Schema | None = None
    """The columns as data files name them, in the order of `schema`, if it isn't as that does."""
    conditions: tuple[FilterTerm, ...] = ()
    """What tells the partition's rows from others in its files; none if there are no others."""

    @classmethod
    def of(
        cls,
        partition: str,
        version: str,
        files: Sequence[InputFile],
        schema: pa.Schema,
        column: str,
        in_files: pa.Schema | None = None,
    ) -> Snapshot:
        """`column` is the partition column that names partitions."""
        others: dict[str, set[str]] = {}
        for file in files:
            for name in file.values.keys() - {column}:
                others.setdefault(name, set()).add(str(file.values[name]))
        ordered = {name: tuple(in_order(others[name])) for name in sorted(others)}
        return cls(partition, version, tuple(files), schema, ordered, in_files)

    @property
    def num_rows(self) -> int:
        """Rows of all files; an upper bound where rows were deleted one by one."""
        return sum(file.num_rows for file in self.files)

    def with_text(self) -> Snapshot:
        """The same rows, with text for bytes."""
        in_files = None if self.in_files is None else as_text(self.in_files)
        return replace(self, schema=as_text(self.schema), in_files=in_files)


class LakeTable(ABC):
    """A table partitioned by one column; the formats pass one behaviour suite."""

    forbidden_in_names = ""
    """Characters that the format doesn't allow in names of columns."""

    def __init__(self, uri: str, partition_column: str, most_file_bytes: int | None) -> None:
        """`most_file_bytes` bounds a new data file; None if a partition is one file of any size."""
        self.uri = uri
        self.partition_column = partition_column
        self.most_file_bytes = most_file_bytes
        self.outer: dict[str, str] = {}
        """Values of further partition columns that are read, as text; of an input alone."""
        self.time_zone: str | None = None
        """Where a day of the partition column's timestamps begins and ends; None is UTC."""

    @abstractmethod
    def partitions(self) -> list[str]:
        """Names of the partitions, as `in_order` has them; none if there is no table."""

    @abstractmethod
    def snapshot(self, partition: str) -> Snapshot:
        """Pin the partition's current content; no files if the table lacks the partition.

        Raises `TableError`: there is no such table, or a file can't be read.
        """

    def scan(
        self,
        snapshot: Snapshot,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm] = (),
        part: FilePart | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Stream the snapshot's rows that meet all conditions, always in the same order.

        `columns` may name values inside columns, as `find_place` has them.
        Later commits lead to an error at most, never to other rows. With `part`, only its rows; of
        the snapshot's files, one is enough then, and `check_unchanged` is left to the caller.

        Raises `TableError`: a column is unknown, its type doesn't allow a condition's comparison,
        or the snapshot is gone.
        """
        conditions = (*snapshot.conditions, *conditions)
        scan = Scan.of(self.uri, snapshot.schema, columns, conditions)
        for file in snapshot.files if part is None else (part.file,):
            if not scan.may_match(file.lowest, file.highest):
                continue
            with self._reading(snapshot.partition, file.name):
                for batch in self._read(snapshot, file, scan, part):
                    yield scan.chosen(batch)
        if part is None:
            self.check_unchanged(snapshot)

    def narrowed(self, snapshot: Snapshot, conditions: Sequence[FilterTerm]) -> Snapshot:
        """The snapshot without the files that conditions rule out; the others have no bounds."""
        scan = Scan.of(self.uri, snapshot.schema, (), conditions)
        files = [file for file in snapshot.files if scan.may_match(file.lowest, file.highest)]
        bare = tuple(replace(file, lowest={}, highest={}) for file in files)
        return replace(snapshot, files=bare)

    @abstractmethod
    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        """The wanted rows of a file, with at least the columns of `scan.schema`."""

    def _reading(self, partition: str, file: str) -> AbstractContextManager[None]:
        return reading(self.uri, partition, file)

    @abstractmethod
    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        """The Parquet footer of one of the snapshot's files; raises `TableError` if it is gone."""

    def check_unchanged(self, snapshot: Snapshot) -> None:  # noqa: B027 - versions don't change
        """Raise `StorageError` if files were replaced since, in a format that allows it."""

    @abstractmethod
    def published(self, partition: str) -> Publication | None:
        """The partition's publication; None if it has no rows, or there is no table.

        Raises `TableError`: the partition holds rows that no job of this package wrote.
        """

    @abstractmethod
    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        """Refuse what `publish` would refuse, as far as the rows' columns tell.

        The returned columns check the rows' values.

        Args:
            partition: the one to publish.
            columns: all but the partition column.
            add_columns: whether columns that the table lacks may be added to it.

        Raises:
            TableError: the table's schema, partitioning or protocol doesn't accept such rows.
            StorageError: the storage can't keep concurrent commits apart.
        """

    def publish(
        self,
        publication: Publication,
        data: Path | StagedRows,
        *,
        replaces: Publication | None,
        add_columns: bool = False,
        again: bool = False,
    ) -> None:
        """Replace the partition by the rows of local Parquet files, in one step.

        Readers see the old or the new rows, never a mixture. Publishing the same rows again changes
        nothing.

        Args:
            publication: that of the rows; their column `run_id` names it.
            data: a file, or a folder of files whose names sort in row order; all columns but the
                partition column, in the table's order when it is new. Or staged rows.
            replaces: what `published` returned when the caller decided to publish.
            add_columns: whether columns that the table lacks may be added to it.
            again: whether the publication's own rows are replaced, too.

        Raises:
            ConflictError: the partition no longer holds `replaces`: another client has published.
            CommitUnknownError: the outcome is unknown; the commit may have happened.
            TableError: the table's schema or partitioning doesn't accept these rows, or the
                partition holds rows that no job of this package wrote.
            StorageError: the storage or the catalog fails; nothing was published.
        """
        check_name(self.uri, publication.partition)
        with self._attempt(publication, data, add_columns) as attempt:
            publish_once(self.uri, publication, replaces, attempt, again=again)

    def partition_of(self, publication: Publication) -> str:
        """The name of its partition: its `run_id` in a table that is partitioned by that."""
        by_run = self.partition_column == RUN_ID
        return publication.run_id if by_run else publication.partition

    def publish_branch(
        self, publication: Publication, data: Path | StagedRows, *, add_columns: bool
    ) -> str:
        """Publish on a branch of an Iceberg table, which only its readers see; returns its name.

        It begins as the table is; one that exists stays as it is. Raises as `publish`; `SpecError`:
        tables of this format have no branches.
        """
        raise SpecError(f"table {self.uri}: only Iceberg tables have branches")

    def promote(self, publication: Publication) -> bool:
        """Make a publication's branch the table's state, in one step, and drop the branch.

        False if there is none, or the table has changed since. Raises `StorageError`: it failed, or
        no answer came; what is published tells.
        """
        return False

    @abstractmethod
    def _attempt(
        self, publication: Publication, data: Path | StagedRows, add_columns: bool
    ) -> AbstractContextManager[Attempt]:
        """What `publish` repeats; on exit, removes the files that no version may refer to."""


class FolderTable(LakeTable):
    """A table whose files lie in one folder."""

    _folder: Folder

    def footer(self, snapshot: Snapshot, file: InputFile) -> pq.FileMetaData:
        with self._reading(snapshot.partition, file.name):
            return read_footer(self._folder, file.name, file.size_bytes)[0]

    def _read(
        self, snapshot: Snapshot, file: InputFile, scan: Scan, part: FilePart | None
    ) -> Iterator[pa.RecordBatch]:
        row_groups = None if part is None else part.row_groups
        with self._folder.open_file(file.name, read_ahead=False) as source:
            yield from read_batches(source, scan.schema, file.values, scan.condition, row_groups)


def open_table(
    uri: str, partition_column: str, most_file_bytes: int = TARGET_FILE_BYTES
) -> LakeTable:
    """The table at an address of the spec; a folder is opened in the format that lies there.

    `most_file_bytes` bounds published data files, in formats that allow several per partition.

    Raises:
        SpecError: the address isn't one, or no catalog or storage of its kind is set up.
        MissingLibraryError: the format's library isn't installed.
        TableError: an Iceberg table's folder is addressed without its catalog.
    """
    try:
        address = TableAddress.parse(uri)
    except ValueError as error:
        raise SpecError(f"{uri}: {error}") from error
    table_format = _format_in(address) if address.format == "parquet" else address.format
    try:  # formats that aren't used aren't imported
        module = import_module(f"batchllm_operator.lake.{table_format}.table")
        table: LakeTable = module.open_at(address, partition_column, most_file_bytes)
    except ModuleNotFoundError as error:
        raise MissingLibraryError.of(error, f"table {uri}") from error
    return table


def _format_in(address: TableAddress) -> str:
    """The format of the table in a folder, whose address names none."""
    folder = Folder.open(address.location)
    if folder.exists("_delta_log"):
        return "delta"
    if any(name.endswith(".metadata.json") for name in folder.child("metadata").find()):
        raise TableError(
            f"table {address.uri}: an Iceberg table lies there; write"
            " iceberg://CATALOG/NAMESPACE.TABLE, as only its catalog knows which of its files count"
        )
    return "parquet"
