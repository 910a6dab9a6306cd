"""Reads one Parquet file in batches whose memory doesn't depend on its row groups.

Arrow's dataset scan decodes whole row groups, several ahead; some hold gigabytes of text. Here a
few rows are decoded at a time, and the pieces are joined. Memory is one batch, plus the dictionary
and the open page of each column, which Parquet makes indivisible.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import and_, attrgetter
from typing import IO, Any, Final, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pds
import pyarrow.parquet as pq
from pyarrow import types

from batchllm_operator.streams import batches_of

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)

_BATCH_BYTES: Final = 16 << 20
_BATCH_ROWS: Final = 4096
_JOINED_BYTES: Final = 1 << 20
# Rows per step if the footer doesn't bound their size, as it counts a dictionary's values once.
# Rows of 1 MiB still fit into one batch; a step costs about 20 us.
_FEW_ROWS: Final = 16
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_WRITTEN_OUT: Final = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}  # encodings
_READ_BYTES: Final = 8 << 20  # buffered for all columns together
_MOST_READ_BYTES: Final = 4 << 20  # per column: a request to S3 should be worth its latency
_LEAST_READ_BYTES: Final = 64 << 10


def read_batches(
    file: IO[bytes],
    schema: pa.Schema,
    folder_values: Mapping[str, Any],
    condition: pds.Expression | None = None,
    row_groups: tuple[int, int] | None = None,
    kept: npt.NDArray[np.bool_] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The file's rows that meet `condition`, in file order, as columns of `schema`.

    A column that the file lacks is null; one of another type is cast. Columns in `folder_values`
    have that value, whatever the file holds. Row groups whose statistics rule out the condition
    aren't read.

    Args:
        file: seekable; stays open.
        schema: all wanted columns, including those of `condition`.
        folder_values: texts, or Python values of the columns' types; None is null.
        row_groups: the only ones to read, half-open.
        kept: [rows of the file] False where one was deleted; None if none was.

    Returns batches of at most 4,096 rows and about 16 MiB, decoded; one row may be larger. Raises
    `pa.ArrowException`, `OSError`: the file can't be read, or a cast or `condition` isn't possible.
    """
    fragment = pds.ParquetFileFormat().make_fragment(
        file, partition_expression=_known(schema, folder_values)
    )
    groups = fragment
    if condition is not None:
        # Arrow compares some values with rows, but not with statistics.
        with suppress(pa.ArrowNotImplementedError):
            groups = fragment.subset(condition, schema=schema)
    begin, end = row_groups or (0, fragment.metadata.num_row_groups)
    chosen = [group for group in groups.row_groups if begin <= group.id < end]
    in_file = [name for name in schema.names if name not in folder_values]
    steps = _steps(file, fragment.metadata, chosen, in_file, kept)
    pieces = (piece for step in steps for piece in halved(step, _BATCH_BYTES))
    for batch in joined(pieces, _BATCH_BYTES):
        aligned = align(batch, schema, folder_values)
        if condition is not None:
            aligned = aligned.filter(condition)
        if aligned.num_rows:
            yield aligned


def _steps(
    file: IO[bytes],
    footer: pq.FileMetaData,
    row_groups: Sequence[pds.RowGroupInfo],
    names: Sequence[str],
    kept: npt.NDArray[np.bool_] | None,
) -> Iterator[pa.RecordBatch]:
    """The columns among `names` that the file has, a few rows at a time."""
    of_groups: Sequence[npt.NDArray[np.bool_]] = ()
    if kept is not None:
        ends = np.cumsum([footer.row_group(idx).num_rows for idx in range(footer.num_row_groups)])
        of_groups = np.split(kept, ends)[:-1]
        if len(kept) != footer.num_rows:
            raise pa.ArrowInvalid(f"it has {footer.num_rows} rows, its log says {len(kept)}")
    buffer_bytes = _READ_BYTES // max(1, len(names))
    reader = pq.ParquetFile(
        file,
        metadata=footer,
        pre_buffer=False,  # it would hold whole row groups
        buffer_size=max(_LEAST_READ_BYTES, min(buffer_bytes, _MOST_READ_BYTES)),
        # Nanoseconds don't cover the range of Spark's 96-bit timestamps.
        coerce_int96_timestamp_unit="us",
        # Otherwise a column that was a dictionary in Arrow carries all its values in each batch.
        binary_type=pa.large_binary(),
    )
    for group in row_groups:
        place = 0
        for batch in reader.iter_batches(
            _step_rows(footer, group.id, names),
            row_groups=[group.id],
            columns=list(names),
            use_threads=False,  # costs more than so few rows gain
        ):
            end = place + batch.num_rows
            yield batch.filter(pa.array(of_groups[group.id][place:end])) if of_groups else batch
            place = end


def _step_rows(footer: pq.FileMetaData, group_id: int, names: Sequence[str]) -> int:
    """Rows of a row group to decode at once: as many as certainly fit, at least a few."""
    group = footer.row_group(group_id)
    all_bytes = row_bytes = 0  # upper bounds: of the whole group, and of each row on top
    for idx in range(group.num_columns):
        chunk, column = group.column(idx), footer.schema.column(idx)
        if not any(f"{column.path}.".startswith(f"{name}.") for name in names):
            continue
        if chunk.physical_type == "BYTE_ARRAY" and set(chunk.encodings) <= _WRITTEN_OUT:
            all_bytes += chunk.total_uncompressed_size
            continue
        value_bytes = (
            _WIDTHS.get(chunk.physical_type)
            or column.length  # of a FIXED_LEN_BYTE_ARRAY
            or chunk.total_uncompressed_size  # holds each distinct value in full
        )
        if column.max_repetition_level:
            all_bytes += value_bytes * chunk.num_values
        else:
            row_bytes += value_bytes
    fitting: int = (_BATCH_BYTES - all_bytes) // max(1, row_bytes)
    average = group.total_byte_size // max(1, group.num_rows)
    few: int = max(1, min(_FEW_ROWS, _BATCH_BYTES // max(1, average)))
    return min(_BATCH_ROWS, max(few, fitting))


def joined(
    batches: Iterable[pa.RecordBatch], most_bytes: int = _JOINED_BYTES
) -> Iterator[pa.RecordBatch]:
    """Consecutive batches in one, as long as it has at most `most_bytes` and 4,096 rows.

    Those of many small files are small, and each costs as much as hundreds of rows.
    """
    rows, size = (_BATCH_ROWS, attrgetter("num_rows")), (most_bytes, attrgetter("nbytes"))
    yield from map(_one, batches_of(batches, rows, size))


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """All in one; empties the list, so that only the caller holds them."""
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    batches.clear()
    return batch


def halved(
    rows: Rows, most_bytes: int, slimmed: Callable[[Rows], Rows] = lambda rows: rows
) -> Iterator[Rows]:
    """The rows in pieces, each `slimmed`, halved until each is small enough or one row."""
    rows = slimmed(rows)
    if rows.nbytes <= most_bytes or rows.num_rows <= 1:
        yield rows
        return
    half = rows.num_rows // 2
    yield from halved(rows.slice(0, half), most_bytes, slimmed)
    yield from halved(rows.slice(half), most_bytes, slimmed)


def align(
    batch: pa.RecordBatch, schema: pa.Schema, folder_values: Mapping[str, Any]
) -> pa.RecordBatch:
    """`batch` with the columns of `schema`, as Arrow's dataset scan evolves a file's schema."""
    columns = []
    for field in schema:
        if field.name in folder_values:
            value = scalar_of(folder_values[field.name], field.type)
            columns.append(pa.repeat(value, batch.num_rows))
        elif field.name in batch.schema.names:
            # Invalid UTF-8 is left to the caller: not all columns mind it.
            options = pc.CastOptions(field.type, allow_invalid_utf8=True)
            column = batch.column(field.name)
            if column.null_count == len(column):  # of any type
                columns.append(pa.nulls(len(column), field.type))
                continue
            try:
                columns.append(pc.cast(column, options=options))
            except pa.ArrowException as error:
                text = f"column {field.name!r} doesn't fit {field.type}: {error}"
                raise type(error)(text) from error
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    if not columns:
        return batch.select([])  # keeps the number of rows
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def scalar_of(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A partition column's value; as text, where it comes from another process: bytes as digits."""
    if not isinstance(value, str):
        return pa.scalar(value, kind)
    if types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.scalar(bytes.fromhex(value), kind)
    if isinstance(kind, pa.UuidType):
        return pa.scalar(UUID(value), kind)
    return pa.scalar(value).cast(kind)


def _known(schema: pa.Schema, folder_values: Mapping[str, Any]) -> pds.Expression:
    """The folder values as a condition, which may rule out the file before it is read."""
    known = (
        pds.field(name).is_null()
        if value is None
        else pds.field(name) == scalar_of(value, schema.field(name).type)
        for name, value in folder_values.items()
        if name in schema.names
    )
    return reduce(and_, known, pds.scalar(True))
