"""Places of values: columns, and what lies inside them (`doc.title`, `tags[0]`, `sizes[eu]`)."""

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchllm_operator.lake.schema import holds, nested_type

_PART: Final = re.compile(r"(?:^|\.)`([^`]+)`|(?:^|\.)([^.\[\]`]+)|\[([^\[\]]+)\]")


@dataclass(frozen=True, slots=True)
class Place:
    """A column, or a value inside it, whose type is `kind`."""

    column: str
    steps: tuple[str, ...]
    """Names of fields, places in lists and keys of maps, from the outside."""
    kind: pa.DataType

    def field(self, schema: pa.Schema, name: str) -> pa.Field:
        own = schema.field(self.column).with_type(self.kind).with_name(name)
        return pa.field(name, self.kind) if self.steps else own

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """Its values, null where there is none; text may be invalid UTF-8."""
        column = batch.column(self.column)
        for step in self.steps:
            column = _inside(column, step)
        if column.type == self.kind:
            return column
        return pc.cast(column, options=pc.CastOptions(self.kind, allow_invalid_utf8=True))


def find_place(schema: pa.Schema, name: str) -> Place | None:
    """The column of that name or, if there is none, the value inside a column; else None.

    A name with a dot or a bracket stands in backquotes: "`a.b`.c".
    """
    if name in schema.names:
        return Place(name, (), schema.field(name).type)
    parts = list(_PART.finditer(name))
    if not parts or "".join(part[0] for part in parts) != name:
        return None
    column, *steps = (part[1] or part[2] or part[3].strip("'\"") for part in parts)
    kind = schema.field(column).type if column in schema.names else None
    for step in steps:
        kind = None if kind is None else _kind_inside(kind, step)
    return None if kind is None else Place(column, tuple(steps), kind)


def as_text(schema: pa.Schema) -> pa.Schema:
    """The same columns, with text for bytes."""
    return pa.schema([field.with_type(_as_text(field.type)) for field in schema])


def _as_text(kind: pa.DataType) -> pa.DataType:
    if not holds(kind, _is_bytes):
        return kind
    return nested_type(kind, _as_text) or pa.string()


def _is_bytes(kind: pa.DataType) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _kind_inside(kind: pa.DataType, step: str) -> pa.DataType | None:
    if types.is_struct(kind):
        idx = kind.get_field_index(step)
        return kind.field(idx).type if idx >= 0 else None
    if types.is_map(kind):
        return kind.item_type if types.is_string(kind.key_type) else None
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list and step.isdecimal() else None


def _inside(column: pa.Array, step: str) -> pa.Array:
    if types.is_struct(column.type):
        return pc.struct_field(column, step)
    if types.is_map(column.type):
        return pc.map_lookup(column, pa.scalar(step, column.type.key_type), "first")
    lists = column.cast(pa.large_list(column.type.value_type))
    is_there = pc.greater(pc.list_value_length(lists), int(step))
    places = pc.add(lists.offsets.slice(0, len(lists)), int(step))
    return lists.values.take(pc.if_else(is_there, places, pa.scalar(None, pa.int64())))
