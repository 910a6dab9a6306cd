"""Hive-partitioned Parquet on local disk or S3.

A published partition is one file, `<column>=<value>/data.parquet`, because one file can be
replaced in one step both locally (rename) and on S3 (PUT), without a transaction log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.folder import Folder
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.lake.table import InputFile, Snapshot
from batchllm_operator.spec import FilterTerm

DATA_FILE: Final = "data.parquet"
_METADATA_PREFIX: Final = "batchllm."
_HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_MAGIC: Final = b"PAR1"
_FOOTER_TAIL_BYTES: Final = 8  # the footer's length (4 bytes, little endian) and the magic
_FOOTER_GUESS_BYTES: Final = 1 << 16  # read first: most footers are smaller


class ParquetTable:
    """A Parquet dataset whose folders are named `column=value`."""

    def __init__(self, folder: Folder, partition_column: str) -> None:
        self._folder = folder
        self._partition_column = partition_column

    @property
    def uri(self) -> str:
        return self._folder.uri

    def partitions(self) -> list[str]:
        """From the first level of folders, where a published partition always is."""
        found = (_hive_values(f"{name}/") for name in self._folder.subfolder_names())
        names = (values.get(self._partition_column) for values in found)
        return sorted(name for name in names if name is not None)

    def snapshot(self, partition: str) -> Snapshot:
        if not self._folder.exists():
            raise TableError(f"table {self.uri}: there is no such folder")
        files = self._files_near(partition)
        if not files:
            raise TableError(f"table {self.uri}: holds no Parquet files")
        if not any(self._partition_column in _hive_values(name) for name in files):
            raise TableError(
                f"table {self.uri}: isn't partitioned by {self._partition_column!r}: there are no"
                f" folders named {self._partition_column}=..."
            )
        chosen = {
            name: details
            for name, details in files.items()
            if _hive_values(name).get(self._partition_column) == partition
        }
        schema_of = chosen or dict(list(files.items())[-1:])  # an absent partition has a schema too
        schemas: list[pa.Schema] = []
        pinned: list[InputFile] = []
        for name, details in schema_of.items():
            footer, footer_digest = self._read_footer(name, int(details["size"]))
            schemas.append(footer.schema.to_arrow_schema())
            etag = str(details.get("ETag", "")).strip('"')
            version = f"etag:{etag}" if etag else f"footer-sha256:{footer_digest}"
            pinned.append(InputFile(name, int(details["size"]), footer.num_rows, version))
        return Snapshot(
            partition=partition,
            files=tuple(file for file in pinned if file.name in chosen),
            schema=self._merge(schemas, next(iter(schema_of))),
        )

    def scan(
        self, snapshot: Snapshot, columns: Sequence[str], conditions: Sequence[FilterTerm] = ()
    ) -> Iterator[pa.RecordBatch]:
        for what, names in (
            ("column", columns),
            ("filter column", [c.column for c in conditions]),
        ):
            for name in names:
                if name not in snapshot.schema.names:
                    raise TableError(
                        f"table {self.uri}: there is no {what} {name!r}; the table has"
                        f" {', '.join(snapshot.schema.names)}"
                    )
        from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

        wanted = dict.fromkeys([*columns, *(c.column for c in conditions)])
        schema = pa.schema([snapshot.schema.field(name) for name in wanted])
        try:
            condition = reduce(and_, map(_expression, conditions)) if conditions else None
            if snapshot.files and condition is not None:
                schema.empty_table().filter(condition)  # a file without rows wouldn't refuse it
            for file in snapshot.files:
                values = _folder_values(snapshot, file.name)
                with self._folder.open_file(file.name, read_ahead=False) as source:
                    for batch in read_batches(source, schema, values, condition):
                        yield batch.select(list(columns))
        except FileNotFoundError as error:
            raise TableError(
                f"table {self.uri}: a file of partition {snapshot.partition!r} vanished while it"
                f" was read: {error}"
            ) from error
        except (pa.ArrowException, OSError, BotoCoreError) as error:
            # Arrow says OSError for damaged data too, without the errno of a real one.
            is_storage = isinstance(error, BotoCoreError) or getattr(error, "errno", None)
            kind = StorageError if is_storage else TableError
            raise kind(
                f"table {self.uri}: partition {snapshot.partition!r} can't be read: {error}"
            ) from error

    def published_metadata(self, partition: str) -> Mapping[str, str] | None:
        folder = self._partition_folder(partition)
        names = [name for name in folder.find() if _is_visible(name)]
        if not names:
            return None
        foreign = [name for name in names if name != DATA_FILE]
        if foreign:
            raise TableError(
                f"output {folder.uri}: holds {foreign[0]!r}, which no job of this package wrote;"
                " move it away or choose another output table"
            )
        with folder.open_file(DATA_FILE) as file:
            try:
                footer = pq.read_metadata(file).metadata or {}
            except (pa.ArrowException, OSError) as error:
                raise TableError(f"output {folder.uri}/{DATA_FILE}: {error}") from error
        ours = {
            key.decode().removeprefix(_METADATA_PREFIX): value.decode()
            for key, value in footer.items()
            if key.startswith(_METADATA_PREFIX.encode())
        }
        if not ours:
            raise TableError(
                f"output {folder.uri}/{DATA_FILE}: wasn't written by a job of this package; move it"
                " away or choose another output table"
            )
        return ours

    def publish(self, partition: str, data: Path) -> None:
        self.published_metadata(partition)  # refuses to replace somebody else's files
        self._partition_folder(partition).publish_file(data, DATA_FILE)

    def _partition_folder(self, partition: str) -> Folder:
        return self._folder.child(f"{self._partition_column}={quote(partition, safe='')}")

    def _files_near(self, partition: str) -> dict[str, dict[str, Any]]:
        """Parquet files that readers see, by name: the partition's, or all if it has none.

        Where the table's first level of folders is the partition column, no other partition
        is listed.
        """
        chosen = [
            name
            for name in self._folder.subfolder_names()
            if _hive_values(f"{name}/").get(self._partition_column) == partition
        ]
        found = {
            f"{name}/{below}": details
            for name in chosen
            for below, details in self._folder.child(name).find().items()
        }
        return _visible(found) or _visible(self._folder.find())

    def _read_footer(self, name: str, size_bytes: int) -> tuple[pq.FileMetaData, str]:
        """A file's Parquet footer, and its SHA-256."""
        broken = f"table {self.uri}: {name} isn't a whole Parquet file"
        try:
            end = self._folder.read_bytes(name, max(0, size_bytes - _FOOTER_GUESS_BYTES))
            if len(end) < _FOOTER_TAIL_BYTES or not end.endswith(_MAGIC):
                raise TableError(broken)
            footer_bytes = int.from_bytes(end[-_FOOTER_TAIL_BYTES:][:4], "little")
            footer_bytes += _FOOTER_TAIL_BYTES
            if footer_bytes > size_bytes:
                raise TableError(broken)
            if footer_bytes > len(end):
                end = self._folder.read_bytes(name, size_bytes - footer_bytes)
        except FileNotFoundError as error:
            raise TableError(f"table {self.uri}: {name} vanished while it was read") from error
        footer = end[-footer_bytes:]
        try:
            metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
        except (pa.ArrowException, OSError) as error:
            raise TableError(f"{broken}: {error}") from error
        return metadata, hashlib.sha256(footer).hexdigest()

    def _merge(self, schemas: list[pa.Schema], name: str) -> pa.Schema:
        """One schema for all files; the folders' columns are strings and win."""
        try:
            merged = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise TableError(
                f"table {self.uri}: the partition's files disagree on a column: {error}"
            ) from error
        hive_columns = _hive_values(name)
        fields = [field for field in merged if field.name not in hive_columns]
        return pa.schema([*fields, *(pa.field(column, pa.string()) for column in hive_columns)])


def published_schema(schema: pa.Schema, metadata: Mapping[str, str]) -> pa.Schema:
    """`schema` marked with `metadata`, as `published_metadata` will give it back."""
    return schema.with_metadata({f"{_METADATA_PREFIX}{k}": v for k, v in metadata.items()})


def _hive_values(name: str) -> dict[str, str]:
    """Partition columns and values in a relative file name such as `ds=2026-01-31/a.parquet`."""
    segments = name.split("/")[:-1]
    pairs = (segment.partition("=") for segment in segments if "=" in segment)
    return {unquote(column): unquote(value) for column, _, value in pairs}


def _folder_values(snapshot: Snapshot, name: str) -> dict[str, str | None]:
    """What the file's folders say of the partition's folder columns; None is null."""
    known = _hive_values(snapshot.files[0].name)  # others aren't in the schema
    found = {column: v for column, v in _hive_values(name).items() if column in known}
    return {column: None if v == _HIVE_NULL else v for column, v in found.items()}


def _is_visible(name: str) -> bool:
    return not any(segment.startswith(("_", ".")) for segment in name.split("/"))


def _visible(files: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Files that hold data: not those below `_x` or `.x`, and not empty ones.

    Only names ending in `.parquet`, if there are any: writers leave other files beside them.
    """
    seen = {n: details for n, details in files.items() if _is_visible(n) and details["size"]}
    return {n: details for n, details in seen.items() if n.endswith(".parquet")} or seen


def _expression(term: FilterTerm) -> pds.Expression:
    field = pds.field(term.column)
    match term.op:
        case "in":
            return field.isin(list(_values(term)))
        case "not in":
            return ~field.isin(list(_values(term)))
        case "==":
            return field == term.value
        case "!=":
            return field != term.value
        case "<":
            return field < term.value
        case "<=":
            return field <= term.value
        case ">":
            return field > term.value
        case ">=":
            return field >= term.value


def _values(term: FilterTerm) -> tuple[str | int | float | bool, ...]:
    assert isinstance(term.value, tuple)  # the spec checks it
    return term.value
