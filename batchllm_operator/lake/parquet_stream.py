"""Rows of one Parquet file in batches of bounded size, whatever the size of its row groups.

`pyarrow.dataset` decodes whole row groups and several ahead, and a row group is a million rows
where a writer leaves it at pyarrow's default: gigabytes of text. Here pages are decoded as they
are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_BYTES: Final = 8 << 20
"""About how much a batch holds, decoded, unless a single row is larger."""
BATCH_ROWS: Final = 4096
_BUFFER_BYTES: Final = 2 << 20  # read at a time, of each column
_DICTIONARY_ROWS: Final = 64


def read_batches(
    file: IO[bytes],
    schema: pa.Schema,
    columns: Sequence[str],
    constants: Mapping[str, str],
) -> Iterator[pa.RecordBatch]:
    """Columns of all rows, in order.

    Args:
        file: a Parquet file, seekable.
        schema: types to give the columns; a column that the file lacks is null.
        columns: which columns, in which order.
        constants: columns that have one value in all rows, whatever the file says.

    Raises:
        pa.ArrowException, OSError: the file is damaged, or a column can't have its type.
    """
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES) as parquet:
        present = set(parquet.schema_arrow.names) - set(constants)
        stored = [name for name in columns if name in present]
        steps = parquet.iter_batches(
            _rows_per_step(parquet.metadata, stored), columns=stored, use_threads=False
        )
        # Without columns, batches have lost their number of rows.
        tables = map(_as_table, steps) if stored else _rows_alone(parquet.metadata.num_rows)
        for table in _gathered(tables):
            arrays = [
                _column(table, name, schema.field(name).type, constants.get(name))
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays(
                arrays, schema=pa.schema([schema.field(name) for name in columns])
            )


def _rows_per_step(metadata: pq.FileMetaData, columns: Sequence[str]) -> int:
    """How many rows to decode at a time: as many as a batch can hold by what the footer says.

    The footer knows a dictionary's size but not how often its values occur. Writers end a
    dictionary at about a megabyte, so some rows at a time won't be too many.
    """
    wanted, num_bytes, has_dictionary = set(columns), 0, False
    for group_idx in range(metadata.num_row_groups):
        group = metadata.row_group(group_idx)
        for column_idx in range(group.num_columns):
            column = group.column(column_idx)
            if column.path_in_schema.partition(".")[0] in wanted:
                num_bytes += column.total_uncompressed_size
                has_dictionary |= column.has_dictionary_page and _varies(column.physical_type)
    num_rows = BATCH_BYTES * int(metadata.num_rows) // max(num_bytes, 1)
    most = _DICTIONARY_ROWS if has_dictionary else BATCH_ROWS
    return max(1, min(num_rows, most))


def _varies(physical_type: str) -> bool:
    """Whether values of a type differ in size."""
    return bool(physical_type == "BYTE_ARRAY")


def _gathered(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Tables put together as long as they make no more than a batch; larger ones are cut."""
    waiting: list[pa.Table] = []
    num_rows, num_bytes = 0, 0
    for table in tables:
        if num_rows + table.num_rows > BATCH_ROWS or num_bytes + table.nbytes > BATCH_BYTES:
            if waiting:
                yield pa.concat_tables(waiting)
            waiting, num_rows, num_bytes = [], 0, 0
        waiting.append(table)
        num_rows += table.num_rows
        num_bytes += table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _as_table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _rows_alone(num_rows: int) -> Iterator[pa.Table]:
    """Tables of a column that nobody asked for, for their number of rows."""
    for start in range(0, num_rows, BATCH_ROWS):
        yield pa.table({"": pa.nulls(min(BATCH_ROWS, num_rows - start))})


def _column(table: pa.Table, name: str, kind: pa.DataType, constant: Any) -> pa.Array:
    if constant is not None:
        return pa.repeat(pa.scalar(constant, kind), table.num_rows)
    if name not in table.column_names:
        return pa.nulls(table.num_rows, kind)
    column = table.column(name)
    if column.type != kind:
        column = column.cast(kind)
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.nulls(0, kind)])
