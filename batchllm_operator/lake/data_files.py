"""Data files to publish: rows in row groups, and row groups in files, of target sizes.

The size of a row group is Parquet's `total_byte_size`: encoded, not compressed. It depends on how
often values repeat, so rows are encoded once to measure it. A file's size is known only as it is
written; a row group adds at most its uncompressed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.lake.schema import StoredColumns
from batchllm_operator.streams import one_ahead

MAX_GROUP_BYTES: Final = 128 << 20
"""Every group but the last has at least half of this, unless memory is the limit: see
`_MOST_HELD_BYTES`."""
_MOST_HELD_BYTES: Final = 192 << 20
"""Rows in memory for one row group: more than a group's size only if values repeat a lot."""
_GROUPS_PER_FILE: Final = 2  # at least, so that files are more than half full
_FILE_FRAME_BYTES: Final = 1 << 12  # magic bytes and the footer's own head
_ZSTD: Final = {"compression": "zstd"}
_MOST_GROWTH: Final = 1.05  # incompressible values, and a table with larger dictionaries


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows that become one row group."""

    rows: pa.Table
    num_bytes: int
    """Size encoded, not compressed."""
    footer_bytes: int
    """Footer size of a file with only this group."""

    @classmethod
    def of(cls, rows: pa.Table) -> RowGroup:
        """Encode the rows to measure them."""
        sink = pa.MockOutputStream()
        with pq.ParquetWriter(sink, rows.schema, compression="none") as writer:
            writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        # A `metadata_collector` would fail after an error, and hide it.
        footer = writer.writer.metadata
        num_bytes = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
        return cls(rows, num_bytes, sink.size() - num_bytes)


def gather(tables: Iterable[pa.Table], most_file_bytes: int | None = None) -> Iterator[RowGroup]:
    """Merge consecutive tables into row groups of half of `MAX_GROUP_BYTES` to all of it.

    Tables have one schema; constant columns may share memory. Groups for small files
    (`most_file_bytes`) are smaller.
    """
    most = _most_group_bytes(most_file_bytes)
    most_held = _MOST_HELD_BYTES * most // MAX_GROUP_BYTES
    enough_held = most * 3 // 4
    kept: list[pa.Table] = []
    counted: set[tuple[int, int]] = set()
    num_held = 0
    for table in tables:
        kept.append(table)
        num_held += _held_bytes(table, counted)
        if num_held < enough_held:
            continue
        group = RowGroup.of(pa.concat_tables(kept))
        times = most * 3 / 4 / max(1, group.num_bytes)
        enough_held = min(most_held, max(1, int(num_held * times)))
        if group.num_bytes * 2 < most and num_held < enough_held:
            continue
        kept, counted, num_held = [], set(), 0
        yield from _split(group, most)
        del group
    if kept:
        yield from fit(pa.concat_tables(kept), most_file_bytes)


def fit(rows: pa.Table, most_file_bytes: int | None) -> Iterator[RowGroup]:
    """The rows in one row group, or in several if they exceed its size."""
    if rows.num_rows:
        yield from _split(RowGroup.of(rows), _most_group_bytes(most_file_bytes))


def write_files(
    groups: Iterable[RowGroup], folder: Path, schema: pa.Schema, most_bytes: int | None
) -> list[Path]:
    """Write row groups to new files in the new local `folder`; see `files_written`."""
    return list(files_written(groups, folder, schema, most_bytes))


def files_written(
    groups: Iterable[RowGroup],
    folder: Path,
    schema: pa.Schema,
    most_bytes: int | None,
    options: Mapping[str, Any] = _ZSTD,
) -> Iterator[Path]:
    """Write row groups to new files, at least one; yields each when it is complete.

    Names sort in row order. A file has at most `most_bytes`, unless one row has more; None for one
    file of any size. Two groups are in memory: one is written while the next is made.

    Args:
        options: those of `pq.ParquetWriter`.
    """
    folder.mkdir()
    with one_ahead(iter(groups)) as made:
        group = next(made, None)
        for number in count():
            path = folder / f"{number:05d}.parquet"
            footer_bytes, is_empty = _FILE_FRAME_BYTES, True
            with (
                pa.OSFile(str(path), "wb") as file,
                pq.ParquetWriter(file, schema, **options) as writer,
            ):
                while group is not None:
                    footer_bytes += group.footer_bytes
                    end = file.tell() + int(group.num_bytes * _MOST_GROWTH) + footer_bytes
                    if most_bytes is not None and end > most_bytes and not is_empty:
                        break
                    writer.write_table(group.rows, row_group_size=max(1, group.rows.num_rows))
                    group, is_empty = next(made, None), False
            yield path
            if group is None:
                return


def files_of(data: Path) -> list[Path]:
    """The file `data`, or the Parquet files in the local folder `data`, in row order."""
    return sorted(data.glob("*.parquet")) if data.is_dir() else [data]


def row_groups(data: Iterable[Path], columns: StoredColumns) -> Iterator[pa.Table]:
    """Each row group of local Parquet files that hold `columns`, in these types.

    Raises `TableError` for a value that the table can't keep.
    """
    names, first_row = columns.schema.names, 0
    for path in data:
        with pq.ParquetFile(path) as file:
            for idx in range(file.num_row_groups):
                rows = file.read_row_group(idx, columns=names, use_threads=False).select(names)
                for batch in rows.to_batches():
                    columns.check(batch, first_row)
                    first_row += batch.num_rows
                yield rows.cast(columns.schema)


def _most_group_bytes(most_file_bytes: int | None) -> int:
    if most_file_bytes is None:
        return MAX_GROUP_BYTES
    return min(MAX_GROUP_BYTES, max(1, most_file_bytes // _GROUPS_PER_FILE))


def _held_bytes(table: pa.Table, counted: set[tuple[int, int]]) -> int:
    """Memory of the table's values outside of the buffers in `counted`, to which it adds theirs."""
    num_bytes = 0
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        values = chunk.buffers()[-1]
        place = (values.address if values is not None else 0, chunk.offset)
        if place not in counted or values is None:
            num_bytes += chunk.nbytes
            counted.add(place)
    return num_bytes


def _split(group: RowGroup, most_bytes: int) -> Iterator[RowGroup]:
    num_rows = group.rows.num_rows
    if group.num_bytes <= most_bytes or num_rows <= 1:
        yield group
        return
    step = -(-num_rows // min(num_rows, -(-group.num_bytes // most_bytes)))
    rows = group.rows
    del group
    for start in range(0, num_rows, step):
        yield from _split(RowGroup.of(rows.slice(start, step)), most_bytes)
