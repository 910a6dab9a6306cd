"""Data files to publish: rows in row groups, and row groups in files, of target sizes.

The size of a row group is what its rows take in memory: encoded they take about as much at most,
and less if values repeat. A file's size is known only as it is written.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from batchllm_operator.lake.row_stream import halved
from batchllm_operator.lake.schema import StoredColumns
from batchllm_operator.streams import batches_of, one_ahead

MAX_GROUP_BYTES: Final = 128 << 20
_GROUPS_PER_FILE: Final = 4  # at least, so that files are more than half full
_ZSTD: Final = {"compression": "zstd"}
_MOST_GROWTH: Final = 1.3  # of distinct integers that are written as a dictionary, too
_FRAME_BYTES: Final = 1 << 12  # magic bytes and the footer's own head
# In the footer and in a page's header, per row group and column without parts. The bounds of texts
# have 4 KiB at most.
_NUMBERS_BYTES: Final = 1 << 10
_TEXTS_BYTES: Final = 17 << 10


def gather(tables: Iterable[pa.Table], most_file_bytes: int | None = None) -> Iterator[pa.Table]:
    """Merge consecutive tables of one schema, or cut them, into row groups of target size.

    Groups for small files (`most_file_bytes`) are smaller.
    """
    most = MAX_GROUP_BYTES
    if most_file_bytes is not None:
        most = min(most, max(1, most_file_bytes // _GROUPS_PER_FILE))
    pieces = (piece for table in tables for piece in halved(table, most, _slimmed))
    for group in batches_of(pieces, (most, attrgetter("nbytes"))):
        yield pa.concat_tables(group)


def write_files(
    groups: Iterable[pa.Table], folder: Path, schema: pa.Schema, most_bytes: int | None
) -> list[Path]:
    """Write row groups to new files in the new local `folder`; see `files_written`."""
    return list(files_written(groups, folder, schema, most_bytes))


def files_written(
    groups: Iterable[pa.Table],
    folder: Path,
    schema: pa.Schema,
    most_bytes: int | None,
    options: Mapping[str, Any] = _ZSTD,
    most_group_rows: int | None = None,
) -> Iterator[Path]:
    """Write row groups to new files, at least one; yields each when it is complete.

    Names sort in row order. A file has at most `most_bytes`, unless one row has more; None for one
    file of any size. Two groups are in memory: one is written while the next is made. `options` are
    those of `pq.ParquetWriter`; groups of more than `most_group_rows` are cut.
    """
    folder.mkdir()
    footer_bytes_each = sum(map(_footer_bytes, schema.types))
    with one_ahead(iter(groups)) as made:
        group = next(made, None)
        for number in count():
            path = folder / f"{number:05d}.parquet"
            footer_bytes, is_empty = _FRAME_BYTES, True
            with (
                pa.OSFile(str(path), "wb") as file,
                pq.ParquetWriter(file, schema, **options) as writer,
            ):
                while group is not None:
                    num_rows = max(1, group.num_rows)
                    group_rows = min(num_rows, most_group_rows or num_rows)
                    footer_bytes += -(-num_rows // group_rows) * footer_bytes_each
                    end = file.tell() + int(group.nbytes * _MOST_GROWTH) + footer_bytes
                    if most_bytes is not None and end > most_bytes and not is_empty:
                        break
                    writer.write_table(group, group_rows)
                    group, is_empty = next(made, None), False
            yield path
            if group is None:
                return


def _slimmed(rows: pa.Table) -> pa.Table:
    """The same rows, with dictionaries of their own values only."""
    for idx, column in enumerate(rows.columns):
        if types.is_dictionary(column.type):
            chunks = pa.chunked_array(map(_only_used, column.chunks), column.type)
            rows = rows.set_column(idx, rows.schema.field(idx), chunks)
    return rows


def _only_used(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    """The same values, without those that no row has: a large dictionary is written whole."""
    if len(chunk.dictionary) <= len(chunk):
        return chunk
    used = chunk.indices.unique().drop_null()
    places = pc.index_in(chunk.indices, used).cast(chunk.type.index_type)
    return pa.DictionaryArray.from_arrays(
        places, chunk.dictionary.take(used), ordered=chunk.type.ordered
    )


def _footer_bytes(kind: pa.DataType) -> int:
    """What a row group adds to the footer and to headers of pages for a column, at most."""
    parts = [kind.field(idx).type for idx in range(kind.num_fields)]
    own = _NUMBERS_BYTES if types.is_primitive(kind) else _TEXTS_BYTES
    return sum(map(_footer_bytes, parts)) if parts else own


def files_of(data: Path) -> list[Path]:
    """The file `data`, or the Parquet files in the local folder `data`, in row order."""
    return sorted(data.glob("*.parquet")) if data.is_dir() else [data]


def stored_batches(data: Iterable[Path], columns: StoredColumns) -> Iterator[pa.RecordBatch]:
    """Rows of local files in the types of `columns`; raises as `StoredColumns.check`."""
    names, first_row = columns.schema.names, 0
    for path in data:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(
                    row_groups=[group], columns=names, use_threads=False
                ):
                    rows = batch.select(names)
                    columns.check(rows, first_row)
                    first_row += rows.num_rows
                    yield rows.cast(columns.schema)
