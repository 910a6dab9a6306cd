"""Converts between Arrow's and Iceberg's types, and between partition names and values."""

from __future__ import annotations

import datetime
from typing import Any, Final

import pyarrow as pa
from pyarrow import types
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids, schema_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.types import DateType, NestedField, TimestampType, TimestamptzType

from batchllm_operator.errors import TableError
from batchllm_operator.lake.partition_order import CAN_NOT_NAME, NAME_ONE, value_named
from batchllm_operator.lake.schema import FormatTypes, plain_type

_EPOCH: Final = datetime.datetime(1970, 1, 1)
_SAME: Final = (
    *(types.is_int32, types.is_int64, types.is_float32, types.is_float64, types.is_boolean),
    *(types.is_string, types.is_binary, types.is_fixed_size_binary, types.is_date32),
)


def arrow_schema(schema: Schema) -> pa.Schema:
    return pa.schema(
        [
            pa.field(field.name, plain_type(field.type), field.nullable)
            for field in schema_to_pyarrow(schema, include_field_ids=False)
        ]
    )


def iceberg_schema(rows: pa.Schema) -> Schema:
    """A new table's schema, or columns to add to one, with provisional field ids."""
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(rows))


def partition_value(where: str, field: NestedField, partition: str) -> str | int | datetime.date:
    """The column's value for a partition's name; each value has one name.

    Raises `TableError`: the name isn't a value of the field's type, or that type can't name
    partitions.
    """
    holds = f"{where}: the partition column holds {field.field_type}"
    try:
        value = value_named(partition, arrow_schema(Schema(field)).field(0).type)
    except TypeError:
        raise TableError(f"{holds}, {CAN_NOT_NAME}") from None
    if value is None:
        raise TableError(f"{holds}, and {partition!r} isn't one; {NAME_ONE}")
    return value


def python_value(kind: Any, value: Any) -> Any:
    """A value from a partition record, where dates and times count from 1970, as Python's."""
    if isinstance(kind, DateType) and isinstance(value, int):
        return _EPOCH.date() + datetime.timedelta(days=value)
    if isinstance(kind, TimestampType | TimestamptzType) and isinstance(value, int):
        return _EPOCH + datetime.timedelta(microseconds=value)
    return value


def _iceberg_type(kind: pa.DataType) -> pa.DataType | None:
    """Wider integers, microseconds, UTC."""
    if any(is_kind(kind) for is_kind in _SAME):
        return kind
    if types.is_integer(kind) and kind.bit_width < 64:
        return pa.int64() if types.is_uint32(kind) else pa.int32()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_date64(kind):
        return pa.date32()
    return pa.time64("us") if types.is_time(kind) else None


ICEBERG: Final = FormatTypes("Iceberg", _iceberg_type, has_calendar=True)
