"""Data files to add to Delta tables: their column types, and their statistics in the log."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.data_files import fit, row_groups, write_files
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.publishing import check_name
from batchllm_operator.lake.schema import (
    check_cases,
    check_fit,
    check_names,
    check_required,
    check_typed,
    plain_type,
)
from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.storage.folder import Folder

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

FILE_PREFIX: Final = "batchllm-"
FORBIDDEN_IN_NAMES: Final = " ,;{}()\n\t=\0"
"""Of columns, without column mapping."""
_MOST_STATISTIC_CHARS: Final = 64
_WIDER: Final = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}
_AS_THEY_ARE: Final = (
    types.is_boolean,
    types.is_signed_integer,
    types.is_float32,
    types.is_float64,
    types.is_decimal128,
    types.is_string,
    types.is_binary,
    types.is_date32,
)


def delta_schema(where: str, schema: pa.Schema) -> pa.Schema:
    """The columns with Delta's types, all nullable.

    Unsigned integers become wider signed ones, timestamps microseconds (in UTC if they have a
    zone), 64-bit dates 32-bit ones; rows with a value that would change are refused. Columns of
    type null stay so.

    Raises:
        TableError: Delta has no type for a column.
    """
    return pa.schema([(field.name, _delta_type(where, field, field.type)) for field in schema])


def accepted(
    folder: Folder,
    seen: TableVersion | None,
    partition: tuple[str, str],
    rows: pa.Schema,
    *,
    add_columns: bool,
) -> tuple[pa.Schema, pa.Schema]:
    """The columns of rows with Delta's types, and those that the table lacks.

    Args:
        folder: the table's.
        seen: its version; None if there is no table.
        partition: the partition column, and its value.
        rows: columns of the rows to publish.
        add_columns: see `LakeTable.check_outputs`.

    Raises:
        TableError: such rows can't be published there.
    """
    (column, name), uri = partition, f"delta+{folder.uri}"
    where = f"output {uri}"
    check_name(uri, name)
    if column in rows.names:
        raise TableError(f"{where}: the rows have the partition column {column!r} themselves")
    check_cases(f"table {uri}", [column, *rows.names])
    columns = delta_schema(where, rows)
    if seen is None:
        _check_free(folder, where)
        new = columns
    else:
        new = check_takes(where, seen, {column: name}, columns, add_columns=add_columns)
    check_typed(where, new)
    check_names(where, new, "\0")  # delta-rs writes all others
    return columns, new


def stored_schema(seen: TableVersion | None, columns: pa.Schema, new: pa.Schema) -> pa.Schema:
    """The columns as the table has them, or will have them."""
    known = {field.name: field for field in [*(seen.schema if seen else ()), *new]}
    return pa.schema([known[name] for name in columns.names])


def _check_free(folder: Folder, where: str) -> None:
    """Refuse to create a table among other files: they would not be part of it."""
    for name in folder.find():
        hidden = any(segment.startswith(("_", ".")) for segment in name.split("/"))
        if not hidden and not name.rpartition("/")[2].startswith(FILE_PREFIX):
            raise TableError(
                f"{where}: holds {name!r}, but is no Delta table; move it away or choose another"
                " output table"
            )


def _has_local_time(kind: pa.DataType) -> bool:
    """Whether values of the type hold timestamps without a time zone."""
    if types.is_timestamp(kind):
        return kind.tz is None
    return any(_has_local_time(kind.field(idx).type) for idx in range(kind.num_fields))


def check_takes(
    where: str,
    version: TableVersion,
    partition_values: Mapping[str, str],
    columns: pa.Schema,
    *,
    add_columns: bool,
) -> pa.Schema:
    """The columns that the table would gain from rows of `columns` (from `delta_schema`).

    `partition_values` are the rows' partition column and its value; `where` names the table in
    errors.

    Raises:
        TableError: the table doesn't accept such rows, or not from this package.
    """
    ((partition_column, partition),) = partition_values.items()
    if version.partition_columns != (partition_column,):
        raise TableError(
            f"{where}: is partitioned by {', '.join(version.partition_columns)}; outputs go to"
            f" tables partitioned by {partition_column!r} alone"
        )
    if version.partition_value(partition_column, partition) is None:
        kind = version.schema.field(partition_column).type
        raise TableError(
            f"{where}: partition column {partition_column!r} holds {kind}, and"
            f" {partition!r} isn't how such a value is written"
        )
    if version.checks:
        raise TableError(
            f"{where}: has rules for new rows that this package doesn't apply:"
            f" {', '.join(version.checks)}; drop them, or choose another output table"
        )
    new = check_fit(where, version.schema, columns, add_columns=add_columns)
    check_required(where, version.schema, [*columns.names, partition_column])
    added = pa.schema([columns.field(name) for name in new])
    if any(map(_has_local_time, added.types)) and not version.takes_local_time:
        raise TableError(
            f"{where}: a new column holds timestamps without a time zone, for which the table"
            " lacks the Delta feature timestampNtz; add it, or give the column a zone"
        )
    return added


class OutputFiles:
    """Rows to publish, as data files in the table's folder that no version refers to yet.

    They are written once for all commits that are tried, unless the table's types change.
    """

    def __init__(
        self,
        folder: Folder,
        subfolder: str,
        data: Sequence[Path],
        most_file_bytes: int,
        prefix: str = "",
    ) -> None:
        """`data` are local Parquet files, at least one, to put into the table's `subfolder`.

        Names begin with `prefix`, so that those of several such puts sort in row order, too.

        Files have at most `most_file_bytes`, unless one row has more.
        """
        self.schema = pq.read_schema(data[0])
        self.may_be_committed = False
        """Whether a version may refer to the files; if so, they are never removed."""
        self._folder = folder
        self._stem = f"{subfolder}/{FILE_PREFIX}{prefix}"
        self._data = data
        self._most_file_bytes = most_file_bytes
        self._put_as: pa.Schema | None = None
        self._names: list[str] = []
        self._actions: list[AddAction] = []

    def put(
        self, where: str, columns: pa.Schema, partition_values: Mapping[str, str]
    ) -> list[AddAction]:
        """Put the files into the folder; returns the actions that add them, none without rows.

        Files that have the types of `columns` are copied unchanged.

        Raises:
            TableError: a value can't be kept, or is null and must not be.
        """
        if self._put_as == columns:
            return self._actions
        self.remove()
        with tempfile.TemporaryDirectory(prefix="batchllm-delta-") as spool:
            data = self._data
            if any(
                plain_type(f.type) != plain_type(columns.field(f.name).type) for f in self.schema
            ):
                data = self._rewrite(where, columns, Path(spool, "data"))
            footers = [(file, pq.read_metadata(file)) for file in data]
            for _, footer in footers:
                _check_nulls(where, columns, footer)
            stem = f"{self._stem}{uuid.uuid4().hex}"
            self._actions = []
            for file, footer in footers:
                if footer.num_rows:
                    name = f"{stem}-{len(self._names):05d}.parquet"  # sorts in row order
                    self._names.append(name)
                    self._folder.publish_file(file, name)
                    self._actions.append(_add_action(name, file, footer, partition_values))
        self._put_as = columns
        return self._actions

    def remove(self) -> None:
        """Remove the files, unless a version may refer to them."""
        while self._names and not self.may_be_committed:
            # Leftovers are harmless, and must not hide the error that led here.
            with suppress(StorageError):
                self._folder.remove(self._names.pop())
        self._names, self._put_as = [], None

    def _rewrite(self, where: str, columns: pa.Schema, target: Path) -> list[Path]:
        """Write the rows to files in the folder `target`, cast to the types of `columns`."""
        most, stored = self._most_file_bytes, StoredColumns(where, columns, has_calendar=False)
        groups = (group for rows in row_groups(self._data, stored) for group in fit(rows, most))
        return write_files(groups, target, columns, most)


def _check_nulls(where: str, columns: pa.Schema, footer: pq.FileMetaData) -> None:
    counts = _null_counts(footer)
    for field in columns:
        if not field.nullable and counts.get(field.name) != 0:
            raise TableError(
                f"{where}: column {field.name!r} may not be null, but not every row of the job's"
                " outputs has a value there"
            )


def _add_action(
    name: str, data: Path, footer: pq.FileMetaData, partition_values: Mapping[str, str]
) -> AddAction:
    from deltalake.transaction import AddAction

    return AddAction(
        path=name,  # deltalake escapes it
        size=data.stat().st_size,
        partition_values=partition_values,
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=_statistics(footer),
    )


def _statistics(footer: pq.FileMetaData) -> str:
    """The log's entry on a data file's values (Delta protocol, "Per-file Statistics"), as JSON.

    Minimum and maximum are given for integers, dates and short strings.
    """
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    for name, found in _flat_columns(footer):
        known = [each for each in found if each is not None and each.has_min_max]
        try:
            least = _plain([each.min for each in known])
            greatest = _plain([each.max for each in known])
        except (OverflowError, ValueError):  # a date that Python doesn't know
            continue
        if least and greatest and len(known) == len(found):
            lowest[name], highest[name] = min(least), max(greatest)
    described = {
        "numRecords": footer.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": _null_counts(footer),
    }
    return json.dumps(described, default=date.isoformat)


def _delta_type(where: str, column: pa.Field, kind: pa.DataType) -> pa.DataType:
    plain = plain_type(kind)
    if any(holds(plain) for holds in _AS_THEY_ARE) or types.is_null(plain):
        return plain
    if plain in _WIDER:
        return _WIDER[plain]
    if types.is_timestamp(plain):
        return pa.timestamp("us", "UTC" if plain.tz else None)
    if types.is_date(plain):
        return pa.date32()
    if types.is_fixed_size_binary(plain):
        return pa.binary()
    if types.is_list(plain):
        return pa.list_(_delta_type(where, column, plain.value_type))
    if types.is_map(plain):
        return pa.map_(
            _delta_type(where, column, plain.key_type), _delta_type(where, column, plain.item_type)
        )
    if types.is_struct(plain):
        return pa.struct([(each.name, _delta_type(where, column, each.type)) for each in plain])
    raise TableError(
        f"{where}: column {column.name!r} holds {column.type}, which Delta has no type for; cast it"
        " in a view of the input"
    )


def _flat_columns(footer: pq.FileMetaData) -> Iterator[tuple[str, list[pq.Statistics | None]]]:
    for idx in range(footer.num_columns):
        column = footer.schema.column(idx)
        if column.path != column.name or column.max_repetition_level:
            continue
        groups = range(footer.num_row_groups)
        yield column.name, [footer.row_group(group).column(idx).statistics for group in groups]


def _null_counts(footer: pq.FileMetaData) -> dict[str, int]:
    return {
        name: sum(each.null_count for each in found if each is not None)
        for name, found in _flat_columns(footer)
        if all(each is not None and each.has_null_count for each in found)
    }


def _plain(values: list[Any]) -> list[Any] | None:
    """The values, if each is an integer, a date, or a short string."""
    if all(type(value) in (int, date) for value in values):
        return values
    if all(type(value) is str and len(value) <= _MOST_STATISTIC_CHARS for value in values):
        return values
    return None
