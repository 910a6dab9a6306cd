"""Reads the rows of one Iceberg data file in batches, columns by field id."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import _read_deletes, pyarrow_to_schema
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from batchllm_operator.lake.iceberg.schema import arrow_schema
from batchllm_operator.lake.parquet_footer import file_schema
from batchllm_operator.lake.row_stream import read_batches, scalar_of
from batchllm_operator.lake.schema import plain_type
from batchllm_operator.lake.table import FilePart, InputFile


def read_file(
    table: Table, path: str, file: InputFile, wanted: Schema, part: FilePart | None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, or a part of it, in their order, without those that were deleted.

    `wanted` are columns of the snapshot's schema; the table may be of any version.

    Raises `FileNotFoundError`, or `pa.ArrowException`, `OSError`, `ValueError`: it can't be read.
    """
    deleted = _deleted(table.io, path, file)
    schema = arrow_schema(wanted)
    known = {field.field_id: field.name for field in wanted.fields if field.name in file.values}
    constants = {field_id: file.values[name] for field_id, name in known.items()}
    with opened(table.io, path) as source:
        footer = pq.read_metadata(source)
        held = _held(table.metadata, file_schema(footer), wanted)
        physical = pa.schema([kind for kind, _ in held])
        fields = {field.field_id: field for _, field in held}
        row_groups = None if part is None else part.row_groups
        kept = None
        if deleted is not None:
            kept = np.isin(np.arange(footer.num_rows), deleted, invert=True)
        for batch in read_batches(source, physical, {}, None, row_groups, kept):
            columns = _columns(
                wanted.fields, schema.types, fields, batch.column, batch.num_rows, constants
            )
            if columns:
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
            else:
                yield batch.select([])  # keeps the number of rows


def _held(
    metadata: TableMetadata, physical: pa.Schema, wanted: Schema
) -> list[tuple[pa.Field, NestedField]]:
    """The wanted columns that a file has, as Arrow's and Iceberg's fields."""
    version = metadata.format_version
    in_file = pyarrow_to_schema(
        physical,
        metadata.name_mapping(),
        downcast_ns_timestamp_to_us=version <= 2,
        format_version=version,
    )
    kinds = {
        field.field_id: kind
        for field, kind in zip(wanted.fields, arrow_schema(wanted).types, strict=True)
    }
    held = []
    for field in in_file.fields:
        kind = kinds.get(field.field_id)
        if kind is not None and pa.types.is_nested(kind):  # nested fields may have other names
            kind = plain_type(physical.field(field.name).type)
        if kind is not None:
            held.append((pa.field(field.name, kind), field))
    return held


def _deleted(file_io: FileIO, path: str, file: InputFile) -> npt.NDArray[np.int64] | None:
    """Positions of the file's deleted rows; None without delete files."""
    if not file.deletes:
        return None
    places = [np.zeros(0, dtype=np.int64)]
    for name, kind in file.deletes:
        with _storage_errors():
            deletes = DataFile.from_args(file_path=name, file_format=FileFormat(kind))
            deleted = _read_deletes(file_io, deletes).get(path)
        if deleted is not None:
            places.append(deleted.to_numpy().astype(np.int64))
    return np.concatenate(places)


def _columns(
    wanted: Sequence[NestedField],
    kinds: Sequence[pa.DataType],
    held: Mapping[int, NestedField],
    column: Callable[[str], pa.Array],
    num_rows: int,
    constants: Mapping[int, Any],
) -> list[pa.Array]:
    """Columns, or parts of a struct, from those of the file, `held`, by their ids.

    The others are their partition's constant, the initial default, or null.
    """
    columns = []
    for field, kind in zip(wanted, kinds, strict=True):
        if (own := held.get(field.field_id)) is not None:
            columns.append(_project(column(own.name), own.field_type, field.field_type, kind))
            continue
        value = constants.get(field.field_id, field.initial_default)
        scalar = scalar_of(value, kind)
        columns.append(pa.repeat(scalar, num_rows) if scalar.is_valid else pa.nulls(num_rows, kind))
    return columns


def _project(
    array: pa.Array, held: IcebergType, wanted: IcebergType, kind: pa.DataType
) -> pa.Array:
    """Convert `array` from type `held` to `wanted`, by field id at every level of nesting.

    pyiceberg's own projection turns null lists into empty ones (0.12, lists of structs). `kind` is
    `wanted` as an Arrow type. Raises `pa.ArrowException`: a value can't be of that type.
    """
    match held, wanted:
        case StructType(), StructType():
            parts = {field.field_id: field for field in held.fields}
            kinds = [part.type for part in kind]
            columns = _columns(wanted.fields, kinds, parts, array.field, len(array), {})
            return pa.StructArray.from_arrays(columns, fields=list(kind), mask=array.is_null())
        case ListType(), ListType():
            offsets, values = _lists(array, array.values)
            items = _project(values, held.element_type, wanted.element_type, kind.value_type)
            return pa.ListArray.from_arrays(offsets, items, type=kind, mask=array.is_null())
        case MapType(), MapType():
            offsets, values = _lists(array, array.keys)
            keys = _project(values, held.key_type, wanted.key_type, kind.key_type)
            _, values = _lists(array, array.items)
            items = _project(values, held.value_type, wanted.value_type, kind.item_type)
            return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())
    return array.cast(kind)


def _lists(array: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Offsets of the lists from 0, and their values; of a slice, only its own."""
    offsets = array.offsets.to_numpy()
    start, end = int(offsets[0]), int(offsets[-1])
    return pa.array(offsets - start), values.slice(start, end - start)


@contextmanager
def opened(file_io: FileIO, path: str) -> Iterator[IO[bytes]]:
    """A file for reading; raises as `read_file`."""
    with _storage_errors():
        opened = file_io.new_input(path).open()
    with opened as stream:
        yield cast(IO[bytes], _StorageFile(stream))


class _StorageFile:
    """A file whose read errors have an errno."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, size: int = -1) -> bytes:
        with _storage_errors():
            return bytes(self._stream.read(*(() if size is None or size < 0 else (size,))))


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Give `OSError`s without an errno, such as Arrow's for remote files, `EIO`.

    The errno distinguishes a failing storage from a damaged file. Missing files raise as before.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(error.errno or errno.EIO, str(error)) from error
