"""Hive-partitioned Parquet on local disk or in an object store.

A published partition is one file, `<column>=<value>/data.parquet`, because one file can be
replaced in one step both locally (rename) and in a store (PUT), without a transaction log. Its
footer names the publication. It is replaced only if it is unchanged: a store compares (on S3
`If-Match`, `If-None-Match`); on local disk a lock keeps other writers of this package out, which
ends with its process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.data_files import files_of
from batchllm_operator.lake.parquet.partitions import (
    HIVE_NULL,
    Partitions,
    folder_name,
    hive_values,
    is_visible,
)
from batchllm_operator.lake.parquet_footer import (
    file_schema,
    publication_of,
    read_footer,
    retyped,
    without_values,
)
from batchllm_operator.lake.publishing import Publication, RefusedCommit, check_name
from batchllm_operator.lake.scanning import reading
from batchllm_operator.lake.schema import StoredColumns, check_fit, merge_schemas
from batchllm_operator.lake.staging import StagedRows
from batchllm_operator.lake.table import FolderTable, InputFile, Snapshot
from batchllm_operator.spec import TableAddress
from batchllm_operator.storage import Folder
from batchllm_operator.storage.failures import http_status, is_unmet, storage_errors
from batchllm_operator.streams import ahead

DATA_FILE: Final = "data.parquet"
_THREADS: Final = 16
"""Footers that are read at the same time: on S3 each is a request."""

Details = Mapping[str, Any]
"""fsspec's, of a file."""


class ParquetTable(FolderTable):
    """A Parquet dataset whose folders are named `column=value`."""

    def __init__(self, folder: Folder, partition_column: str) -> None:
        super().__init__(folder.uri, partition_column, None)
        self._folder = folder
        self._partitions = Partitions(folder, partition_column, self.outer)

    def partitions(self) -> list[str]:
        """Read from folder names; a published partition is always at the first level."""
        return self._partitions.names()

    def snapshot(self, partition: str) -> Snapshot:
        if not self._folder.exists():
            raise TableError(
                f"table {self.uri}: there is no such folder; check the address, or write the table"
                " first"
            )
        files = self._partitions.files_near(partition)
        if not files:
            raise TableError(f"table {self.uri}: holds no Parquet files")
        for column in (self.partition_column, *self.outer):
            if not any(column in hive_values(name) for name in files):
                raise TableError(
                    f"table {self.uri}: isn't partitioned by {column!r}: there are no folders named"
                    f" {column}=..."
                )
        chosen = self._partitions.chosen(files, partition)
        schemas: dict[str, pa.Schema] = {}
        last: pa.Schema | None = None
        kinds: dict[str, pa.DataType] = {}
        unused: set[str] = set()  # columns that had no value in the files of `last`
        pinned: list[InputFile] = []
        columns = hive_values(next(iter(chosen), ""))  # others aren't in the schema
        pin = partial(self._pin, partition)
        for schema, file, footer in ahead(chosen.items(), pin, num_threads=_THREADS):
            if is_new := last is None or not schema.equals(last, check_metadata=True):
                last, unused = schema, set(schema.names)
                kinds |= {f.name: f.type for f in schema if not pa.types.is_null(f.type)}
            if is_new or unused:
                empty = without_values(footer, unused)
                if is_new or empty != unused:
                    nulls = dict.fromkeys(empty, pa.null())  # fits a column of any type
                    schemas[file.name], unused = retyped(schema, nulls), empty
            values = {n: value for n, value in hive_values(file.name).items() if n in columns}
            pinned.append(replace(file, values=values))
        merged = self._merge(schemas or self._newest_schema(files, partition))
        unused = {field.name for field in merged if pa.types.is_null(field.type)}
        merged = retyped(merged, {name: kinds[name] for name in unused & kinds.keys()})
        version = _listing_version(pinned)
        return Snapshot.of(partition, version, pinned, merged, self.partition_column)

    def _pin(
        self, partition: str, item: tuple[str, Details]
    ) -> tuple[pa.Schema, InputFile, pq.FileMetaData]:
        """A file's columns, its entry in a snapshot, and its footer."""
        name, size_bytes = item[0], int(item[1]["size"])
        footer, digest = read_footer(self._folder, name, size_bytes)
        version = _etag_version(item[1]) or f"footer-sha256:{digest}"
        with self._reading(partition, name):
            file = InputFile(name, size_bytes, footer.num_rows, version)
            return file_schema(footer), file, footer

    def _newest_schema(self, files: Mapping[str, Details], partition: str) -> dict[str, pa.Schema]:
        """The columns of an absent partition: those of the last readable file."""
        newest, *others = reversed(list(files.items()))
        for item in (newest, *others):
            with suppress(TableError):
                return {item[0]: self._pin(partition, item)[0]}
        return {newest[0]: self._pin(partition, newest)[0]}  # raises

    def check_unchanged(self, snapshot: Snapshot) -> None:
        near = self._partitions.files_near(snapshot.partition)
        now = self._partitions.chosen(near, snapshot.partition)
        sizes = {name: int(details["size"]) for name, details in now.items()}

        def is_same(file: InputFile) -> bool:
            item = file.name, now[file.name]
            version = _etag_version(item[1]) or self._pin(snapshot.partition, item)[1].version
            return version == file.version

        if sizes != {file.name: file.size_bytes for file in snapshot.files} or not all(
            ahead(snapshot.files, is_same, num_threads=_THREADS)
        ):
            raise StorageError(
                f"table {self.uri}, partition {snapshot.partition!r}: changed while it was read;"
                " start again"
            )

    def published(self, partition: str) -> Publication | None:
        return self._look(partition)[1]

    def check_outputs(
        self, partition: str, columns: pa.Schema, *, add_columns: bool = False
    ) -> StoredColumns:
        check_name(self.uri, partition)
        if partition == HIVE_NULL:
            raise TableError(
                f"output {self.uri}: a folder named {HIVE_NULL} means null; choose another name"
            )
        self._folder.check_conditional_writes("IfNoneMatch", "IfMatch")
        self._partitions.check_apart()
        known = self._schema_beside(partition) or columns
        check_fit(f"table {self.uri}", known, columns, add_columns=add_columns)
        nullable = pa.schema([field.with_nullable(True) for field in columns])
        return StoredColumns(f"output {self.uri}", nullable, has_calendar=False)

    @contextmanager
    def _attempt(
        self, publication: Publication, data: Path | StagedRows, add_columns: bool
    ) -> Iterator[_Replacement]:
        """The footer of `data` must name the publication (`published_schema`)."""
        assert isinstance(data, Path), "nothing is staged"
        (file,), partition = files_of(data), self.partition_of(publication)
        footer = pq.read_metadata(file)
        rows = footer.schema.to_arrow_schema()
        self.check_outputs(partition, rows, add_columns=add_columns)
        if publication_of(footer) != publication:
            raise ValueError(f"{file}: its footer doesn't name {publication.run_id}")
        with exclusive(self._folder, folder_name(self.partition_column, partition)):
            yield _Replacement(self, partition, file)

    def _look(self, partition: str) -> tuple[Folder, Publication | None, Any]:
        """The partition's folder, its publication, and the `etag_of` its file."""
        folder, names = self._partition_folder(partition)
        foreign = [name for name in names if name != DATA_FILE]
        if foreign:
            raise TableError(
                f"output {folder.uri}: holds {foreign[0]!r}, which no job of this package wrote;"
                " move it away or choose another output table"
            )
        if not names:
            return folder, None, None
        where = f"{folder.uri}/{DATA_FILE}"
        try:
            with folder.open_file(DATA_FILE) as file, reading(where, partition):
                etag, publication = etag_of(file), publication_of(pq.read_metadata(file))
        except FileNotFoundError:  # removed since it was listed
            return folder, None, None
        if publication is None:
            raise TableError(
                f"output {where}: wasn't written by a job of this package; move it"
                " away or choose another output table"
            )
        return folder, publication, etag

    def _schema_beside(self, partition: str) -> pa.Schema | None:
        """Columns of the last other partition that has a published file."""
        for name in reversed([name for name in self.partitions() if name != partition]):
            folder, files = self._partition_folder(name)
            if DATA_FILE in files:
                footer, _ = read_footer(folder, DATA_FILE, int(files[DATA_FILE]["size"]))
                return file_schema(footer)
        return None

    def _partition_folder(self, partition: str) -> tuple[Folder, dict[str, dict[str, Any]]]:
        """The partition's folder, and the files in it that readers see.

        Other programs may escape the name differently: readers take that for the same partition.
        """
        own = folder_name(self.partition_column, partition)
        holding = {}
        for name in dict.fromkeys((own, *self._partitions.folders(partition))):
            below = self._folder.child(name).find()
            if files := {n: details for n, details in below.items() if is_visible(n)}:
                holding[name] = files
        if len(holding) > 1:
            raise TableError(
                f"output {self.uri}: partition {partition!r} lies in two folders,"
                f" {' and '.join(map(repr, holding))}; move one away"
            )
        ((name, files),) = holding.items() or ((own, {}),)
        return self._folder.child(name), files

    def _merge(self, schemas: Mapping[str, pa.Schema]) -> pa.Schema:
        """One schema for all files, by name; the folders' columns are strings and win."""
        merged = merge_schemas(f"table {self.uri}", schemas)
        hive_columns = hive_values(next(iter(schemas)))
        fields = [field for field in merged if field.name not in hive_columns]
        return pa.schema([*fields, *(pa.field(column, pa.string()) for column in hive_columns)])


def open_at(address: TableAddress, partition_column: str, most_file_bytes: int) -> ParquetTable:
    """The table at an address of this format; `open_table` finds this function by its name."""
    return ParquetTable(Folder.open(address.location), partition_column)


@dataclass
class _Replacement:
    """See `Attempt`: replaces the partition's file, whose lock the caller holds."""

    table: ParquetTable
    partition: str
    source: Path

    def look(self) -> Publication | None:
        self._folder, publication, self._etag = self.table._look(self.partition)
        return publication

    def commit(self) -> RefusedCommit | None:
        return replace_file(self._folder, self.source, DATA_FILE, etag=self._etag)


def _etag_version(details: Details) -> str | None:
    """The version of a file with these details from `Folder.find`; None without ETags."""
    etag = str(details.get("ETag", "")).strip('"')
    return f"etag:{etag}" if etag else None


def _listing_version(files: Iterable[InputFile]) -> str:
    listed = "".join(f"{file.name}\0{file.size_bytes}\0{file.version}\n" for file in files)
    return f"listing:{hashlib.sha256(listed.encode()).hexdigest()}"


@contextmanager
def exclusive(folder: Folder, name: str) -> Iterator[None]:
    """Lock the local file `name` against replacement; on S3 do nothing."""
    if not folder.is_local:
        yield
        return
    path = Path(folder.full_path(f".{name}.lock"))
    # Another kind of lock wouldn't end with its process.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise StorageError(f"{path}: can't be locked: {error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while locked, or another's would be removed
        lock.release()


def etag_of(file: Any) -> Any:
    """What `put_if` compares of a file from `Folder.open_file`, to whose reads it applies, too; of
    S3 the ETag; None on local disk."""
    details = getattr(file, "details", None)
    return details.get("version", details.get("ETag")) if isinstance(details, dict) else None


def replace_file(folder: Folder, source: Path, name: str, *, etag: Any) -> RefusedCommit | None:
    """Replace `name`, which has the ETag or isn't there, by a copy of `source`; None if done.

    The caller holds the folder's `exclusive` lock.
    """
    try:
        if folder.is_local:
            folder.publish_file(source, name)
        else:
            folder.fs.put_if(folder.full_path(name), source, etag)
        return None
    except StorageError as error:
        return RefusedCommit(str(error), error, may_repeat=False)
    except storage_errors() as error:
        text, status = f"{folder.uri}/{name}: {error}", http_status(error)
        # 404, too, where a file was expected.
        if is_unmet(error) or (status == 404 and etag is not None):
            return RefusedCommit(text, error)
        is_answered = status is not None and status < 500
        return RefusedCommit(text, error, may_arrive=not is_answered, may_repeat=False)
