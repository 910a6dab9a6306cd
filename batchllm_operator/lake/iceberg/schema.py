"""Converts between Arrow's and Iceberg's types, and between partition names and values."""

from __future__ import annotations

import datetime
from typing import Any, Final

import pyarrow as pa
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids, schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import DateType, NestedField, TimestampType, TimestamptzType

from batchllm_operator.errors import TableError
from batchllm_operator.lake.partition_order import CAN_NOT_NAME, NAME_ONE, times_named, value_named
from batchllm_operator.lake.schema import FormatTypes, plain_type

_EPOCH: Final = datetime.datetime(1970, 1, 1)
ICEBERG: Final = FormatTypes(
    "Iceberg",
    {
        **dict.fromkeys((pa.int8(), pa.int16(), pa.uint8(), pa.uint16()), pa.int32()),
        **dict.fromkeys(map(pa.time32, ("s", "ms")), pa.time64("us")),
        **dict.fromkeys(map(pa.time64, ("us", "ns")), pa.time64("us")),
        **dict.fromkeys((pa.uint32(), pa.uint64()), pa.int64()),
        **{pa.float16(): pa.float32()},
    },
    has_fixed_binary=True,
    has_calendar=True,
)


def arrow_schema(schema: Schema) -> pa.Schema:
    fields = schema_to_pyarrow(schema, include_field_ids=False)
    return pa.schema(
        [(field.with_type(plain_type(field.type))).remove_metadata() for field in fields]
    )


def iceberg_schema(rows: pa.Schema) -> Schema:
    """A new table's schema, or columns to add to one, with provisional field ids."""
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(rows))


def rows_named(
    where: str, field: NestedField, name: str, zone: str | None
) -> list[tuple[str, str | int | datetime.date]]:
    """What tells the rows of a partition's name: comparisons with one value, or with two times.

    Raises `TableError`: the name isn't one of the column's.
    """
    holds = f"{where}: the partition column holds {field.field_type}"
    kind = arrow_schema(Schema(field)).field(0).type
    is_time = pa.types.is_timestamp(kind)
    try:
        if not is_time and not (pa.types.is_date(kind) and len(name) <= len("2026-01")):
            value = value_named(name, kind)
            if value is None:
                raise TableError(f"{holds}, and {name!r} isn't one; {NAME_ONE}")
            return [("==", value)]
        moments = times_named(name, zone if is_time else None)
        begin, end = (pa.scalar(moment).cast(kind).as_py() for moment in moments)
    except TypeError:
        raise TableError(f"{holds}, {CAN_NOT_NAME}") from None
    except (ValueError, OverflowError):  # nanoseconds have fewer years
        raise TableError(
            f"{holds}, and {name!r} isn't a year, month, day or hour (2026-01-31-05) of it;"
            f" {NAME_ONE}"
        ) from None
    return [(">=", begin), ("<", end)]


def python_value(kind: Any, value: Any) -> Any:
    """A value from a partition record, where dates and times count from 1970, as Python's."""
    if isinstance(kind, DateType) and isinstance(value, int):
        return _EPOCH.date() + datetime.timedelta(days=value)
    if isinstance(kind, TimestampType | TimestamptzType) and isinstance(value, int):
        zone = datetime.UTC if isinstance(kind, TimestamptzType) else None
        return _EPOCH.replace(tzinfo=zone) + datetime.timedelta(microseconds=value)
    return value
