"""The columns of rows in a Delta table, and the rows that such a table takes."""

from __future__ import annotations

from functools import partial
from typing import Final

import pyarrow as pa
from pyarrow import types

from batchllm_operator.errors import TableError
from batchllm_operator.lake.delta.version import TableVersion
from batchllm_operator.lake.schema import (
    check_names,
    check_own,
    check_takes,
    holds,
    nested_type,
    plain_type,
)
from batchllm_operator.storage import Folder

FILE_PREFIX: Final = "batchllm-"
FORBIDDEN_IN_NAMES: Final = " ,;{}()\n\t=\0"
"""Of columns, without column mapping."""
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


def accepted(
    folder: Folder,
    seen: TableVersion | None,
    place: tuple[str, str],
    rows: pa.Schema,
    *,
    add_columns: bool,
) -> tuple[pa.Schema, pa.Schema]:
    """The columns of rows as the table has, or will have, them; and those that the table lacks.

    New columns have Delta's types, and may be null. Unsigned integers become wider signed ones,
    timestamps microseconds (in UTC if they have a zone), 64-bit dates 32-bit ones; rows with a
    value that would change are refused.

    Args:
        folder: the table's.
        seen: its version; None if there is no table.
        place: the partition column, and its value.
        rows: columns of the rows to publish.
        add_columns: see `LakeTable.check_outputs`.

    Raises:
        TableError: such rows can't be published there.
    """
    column, value = place
    where = f"output delta+{folder.uri}"
    check_own(where, column, rows)
    columns = pa.schema([(field.name, _delta_type(where, field, field.type)) for field in rows])
    if seen is None:
        _check_free(folder, where)
    else:
        _check_partition(where, seen, column, value)
    table = None if seen is None else seen.schema
    new = check_takes(where, table, column, columns, add_columns=add_columns)
    takes_local_time = seen is None or seen.takes_local_time
    if not takes_local_time and any(holds(kind, _is_local_time) for kind in new.types):
        raise TableError(
            f"{where}: a new column holds timestamps without a time zone, for which the table"
            " lacks the Delta feature timestampNtz; add it, or give the column a zone"
        )
    check_names(where, new, "\0")  # delta-rs writes all others
    known = {field.name: field for field in [*(table or ()), *new]}
    return pa.schema([known[name] for name in columns.names]), new


def _check_partition(where: str, version: TableVersion, column: str, value: str) -> None:
    """Refuse a table whose partition, or whose rules, are none for this package's rows."""
    if version.partition_columns != (column,):
        raise TableError(
            f"{where}: is partitioned by {', '.join(version.partition_columns)}; outputs go to"
            f" tables partitioned by {column!r} alone"
        )
    if version.partition_value(column, value) is None:
        raise TableError(
            f"{where}: partition column {column!r} holds {version.schema.field(column).type}, and"
            f" {value!r} isn't how such a value is written"
        )
    if rules := list(version.rules()):
        raise TableError(
            f"{where}: has rules for new rows that this package doesn't apply:"
            f" {', '.join(rules)}; drop them, or choose another output table"
        )


def _check_free(folder: Folder, where: str) -> None:
    """Refuse to create a table among other files: they would not be part of it."""
    for name in folder.find():
        hidden = any(segment.startswith(("_", ".")) for segment in name.split("/"))
        if not hidden and not name.rpartition("/")[2].startswith(FILE_PREFIX):
            raise TableError(
                f"{where}: holds {name!r}, but is no Delta table; move it away or choose another"
                " output table"
            )


def _is_local_time(kind: pa.DataType) -> bool:
    """Whether values of the type are timestamps without a time zone."""
    return bool(types.is_timestamp(kind) and kind.tz is None)


def _delta_type(where: str, column: pa.Field, kind: pa.DataType) -> pa.DataType:
    plain = plain_type(kind)
    if any(is_such(plain) for is_such in _AS_THEY_ARE) or types.is_null(plain):
        return plain
    if plain in _WIDER:
        return _WIDER[plain]
    if types.is_timestamp(plain):
        return pa.timestamp("us", "UTC" if plain.tz else None)
    if types.is_date(plain):
        return pa.date32()
    if types.is_fixed_size_binary(plain):
        return pa.binary()
    nested = nested_type(plain, partial(_delta_type, where, column))
    if nested is not None:
        return nested
    raise TableError(
        f"{where}: column {column.name!r} holds {column.type}, which Delta has no type for; cast it"
        " in a view of the input"
    )
