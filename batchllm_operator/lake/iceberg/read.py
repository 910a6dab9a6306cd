"""Reads the rows of one Iceberg data file in batches, columns by field id."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Mapping, Sequence
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
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from batchllm_operator.lake.iceberg.schema import arrow_schema
from batchllm_operator.lake.parquet_footer import file_schema
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.lake.scanning import row_condition
from batchllm_operator.lake.schema import plain_type
from batchllm_operator.lake.table import FilePart
from batchllm_operator.spec import FilterTerm


class IcebergFiles:
    """Reads some of the table's columns from data files.

    `schema` is the snapshot's, with all columns; `columns` are those wanted, each once. Rows
    that don't meet the `conditions`, which are on wanted columns, may still be returned.
    """

    def __init__(
        self,
        uri: str,
        metadata: TableMetadata,
        file_io: FileIO,
        schema: Schema,
        columns: Sequence[str],
        conditions: Sequence[FilterTerm],
    ) -> None:
        self._uri = uri
        self._metadata = metadata
        self._io = file_io
        fields = {field.name: field for field in schema.fields}
        self._wanted = Schema(*(fields[name] for name in columns))
        self._arrow_schema = arrow_schema(self._wanted)
        self._conditions = conditions

    def read(self, task: FileScanTask, part: FilePart | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a file, or a part of it, in their order, without those that were deleted.

        Raises:
            FileNotFoundError: the file is gone.
            pa.ArrowException, OSError, ValueError: it is damaged or can't be read.
        """
        if task.file.file_format != FileFormat.PARQUET:
            raise ValueError(f"{task.file.file_path}: only Parquet data files can be read")
        deleted = self._deleted(task)
        with _opened(self._io, task.file.file_path) as source:
            held = self._held(file_schema(pq.read_metadata(source)))
            fields = {field.field_id: field for _, field in held}
            # Deletes go by row position, so no rows may be filtered out before them.
            condition = None if deleted is not None else self._condition(fields, held)
            start, row_groups = (0, None) if part is None else (part.first_row, part.row_groups)
            wanted = pa.schema([kind for kind, _ in held])
            for batch in read_batches(source, wanted, {}, condition, row_groups):
                places = np.arange(start, start + batch.num_rows)
                start += batch.num_rows
                if deleted is not None:
                    batch = batch.filter(pa.array(~np.isin(places, deleted)))
                yield self._project(batch, fields, self._constants(task.file))

    def _held(self, physical: pa.Schema) -> list[tuple[pa.Field, NestedField]]:
        """The wanted columns that the file has, as Arrow's and Iceberg's fields."""
        version = self._metadata.format_version
        in_file = pyarrow_to_schema(
            physical,
            self._metadata.name_mapping(),
            downcast_ns_timestamp_to_us=version <= 2,
            format_version=version,
        )
        ids = [field.field_id for field in self._wanted.fields]
        wanted = dict(zip(ids, self._arrow_schema.types, strict=True))
        held = []
        for field in in_file.fields:
            kind = wanted.get(field.field_id)
            if kind is not None and pa.types.is_nested(kind):  # nested fields may have other names
                kind = plain_type(physical.field(field.name).type)
            if kind is not None:
                held.append((pa.field(field.name, kind), field))
        return held

    def _project(
        self, batch: pa.RecordBatch, held: dict[int, NestedField], constants: dict[int, Any]
    ) -> pa.RecordBatch:
        columns = []
        for field, kind in zip(self._wanted.fields, self._arrow_schema.types, strict=True):
            own = held.get(field.field_id)
            columns.append(
                absent(field, kind, batch.num_rows, constants)
                if own is None
                else project(batch.column(own.name), own.field_type, field.field_type, kind)
            )
        if not columns:
            return batch.select([])  # keeps the number of rows
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow_schema)

    def _constants(self, file: DataFile) -> dict[int, Any]:
        """Values of columns that are constant in the file's partition, by field id."""
        parts = enumerate(self._metadata.specs()[file.spec_id].fields)
        return {
            part.source_id: file.partition[place]
            for place, part in parts
            if isinstance(part.transform, IdentityTransform)
        }

    def _condition(
        self, fields: dict[int, NestedField], held: list[tuple[pa.Field, NestedField]]
    ) -> Any:
        """The conditions on columns that the file has, by its own names, to skip row groups."""
        ids = {field.name: field.field_id for field in self._wanted.fields}
        terms = [
            term.model_copy(update={"column": fields[ids[term.column]].name})
            for term in self._conditions
            if ids[term.column] in fields
        ]
        return row_condition(self._uri, terms, pa.schema([kind for kind, _ in held]))

    def _deleted(self, task: FileScanTask) -> npt.NDArray[np.int64] | None:
        """Positions of the file's deleted rows; None without delete files."""
        if not task.delete_files:
            return None
        places = [np.zeros(0, dtype=np.int64)]
        for file in task.delete_files:
            with _storage_errors():
                deleted = _read_deletes(self._io, file).get(task.file.file_path)
            if deleted is not None:
                places.append(deleted.to_numpy().astype(np.int64))
        return np.concatenate(places)


def project(array: pa.Array, held: IcebergType, wanted: IcebergType, kind: pa.DataType) -> pa.Array:
    """Convert `array` from type `held` to `wanted`, by field id at every level of nesting.

    pyiceberg's own projection turns null lists into empty ones (0.12, lists of structs).

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


@contextmanager
def _opened(file_io: FileIO, path: str) -> Iterator[IO[bytes]]:
    with _storage_errors():
        opened = file_io.new_input(path).open()
    with opened as stream:
        yield cast(IO[bytes], StorageFile(stream))


def read_metadata(file_io: FileIO, path: str) -> pq.FileMetaData:
    """The Parquet footer of a data file; raises as `IcebergFiles.read`."""
    with _opened(file_io, path) as source:
        return pq.read_metadata(source)


class StorageFile(io.RawIOBase):
    """A file whose read errors have an errno."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

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
