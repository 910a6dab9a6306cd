"""Names of a Delta table's columns in its data files (Delta protocol, "Column Mapping")."""

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.lake.parquet_footer import file_schema
from batchllm_operator.lake.schema import nested_type

PHYSICAL_NAME: Final = b"delta.columnMapping.physicalName"
_ID: Final = b"delta.columnMapping.id"
_PARQUET_ID: Final = b"PARQUET:field_id"
_BY_ID: Final = "\0"  # begins names in mode `id`: files have others for the field of an id


def logical_columns(schema: pa.Schema) -> pa.Schema:
    """The columns of a table's schema, as its users name them."""
    return _renamed(schema, lambda field: field.name)


def physical_columns(schema: pa.Schema, mode: str) -> pa.Schema:
    """The columns of a table's schema, as `columns_in_file` finds them in a file."""
    if mode == "id":
        return _renamed(schema, lambda field: _BY_ID + field.metadata[_ID].decode())
    return _renamed(schema, lambda field: field.metadata[PHYSICAL_NAME].decode())


def columns_in_file(columns: pa.Schema, file: IO[bytes]) -> pa.Schema:
    """`physical_columns`, as a file names them; raises `pa.ArrowException` if it names no ids."""
    if not any(name.startswith(_BY_ID) for name in columns.names):
        return columns
    names = dict(_names_by_id(file_schema(pq.read_metadata(file))))
    if not names:
        raise pa.ArrowInvalid("its columns have no ids, which the table's column mapping goes by")
    return _renamed(columns, lambda field: names.get(field.name, field.name))


def _names_by_id(fields: Iterable[pa.Field]) -> Iterator[tuple[str, str]]:
    for field in fields:
        if _PARQUET_ID in (field.metadata or {}):
            yield _BY_ID + field.metadata[_PARQUET_ID].decode(), field.name
        yield from _names_by_id(field.type.field(idx) for idx in range(field.type.num_fields))


def _renamed(schema: pa.Schema, name: Callable[[pa.Field], str]) -> pa.Schema:
    def renamed(kind: pa.DataType) -> pa.DataType:
        return nested_type(kind, renamed, name) or kind

    return pa.schema([(name(field), renamed(field.type)) for field in schema])
