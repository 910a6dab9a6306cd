"""Projects a data file's values onto the table's columns, by field id at every level of nesting.

pyiceberg's own projection turns null lists into empty ones (0.12, lists of structs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType


def project(array: pa.Array, held: IcebergType, wanted: IcebergType, kind: pa.DataType) -> pa.Array:
    """Convert `array` from type `held` to `wanted`.

    Args:
        array: of any length and offset.
        held: its type, with the file's names and ids.
        wanted: the column's type now.
        kind: `wanted` as an Arrow type.

    Raises:
        pa.ArrowException: a value can't be of that type.
    """
    match held, wanted:
        case StructType(), StructType():
            places = {field.field_id: place for place, field in enumerate(held.fields)}
            names = [field.name for field in array.type]
            columns = [
                project(
                    array.field(names.index(held.fields[places[field.field_id]].name)),
                    held.fields[places[field.field_id]].field_type,
                    field.field_type,
                    kind.field(place).type,
                )
                if field.field_id in places
                else absent(field, kind.field(place).type, len(array))
                for place, field in enumerate(wanted.fields)
            ]
            return pa.StructArray.from_arrays(columns, fields=list(kind), mask=array.is_null())
        case ListType(), ListType():
            offsets, values = _lists(array, array.values)
            items = project(values, held.element_type, wanted.element_type, kind.value_type)
            return pa.ListArray.from_arrays(offsets, items, type=kind, mask=array.is_null())
        case MapType(), MapType():
            offsets, values = _lists(array, array.keys)
            keys = project(values, held.key_type, wanted.key_type, kind.key_type)
            _, values = _lists(array, array.items)
            items = project(values, held.value_type, wanted.value_type, kind.item_type)
            return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())
    return array.cast(kind)


def absent(
    field: NestedField, kind: pa.DataType, num_rows: int, constants: Mapping[int, Any] | None = None
) -> pa.Array:
    """A column that the file lacks: its partition's constant, the initial default, or null."""
    value = (constants or {}).get(field.field_id, field.initial_default)
    return (
        pa.nulls(num_rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), num_rows)
    )


def _lists(array: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Offsets of the lists from 0, and their values; of a slice, only its own."""
    offsets = array.offsets.to_numpy()
    start, end = int(offsets[0]), int(offsets[-1])
    return pa.array(offsets - start), values.slice(start, end - start)
