"""Data files to publish: rows in row groups, and row groups in files, of target sizes.

The size of a row group is Parquet's `total_byte_size`: encoded, not compressed. It depends on how
often values repeat, so rows are encoded once to measure it. A file's size is known only as it is
written; a row group adds at most its uncompressed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.lake.stored_columns import StoredColumns
from batchllm_operator.streams import ahead

MAX_GROUP_BYTES: Final = 128 << 20
"""Every group but the last has at least half of this, unless memory is the limit: see
`_MOST_HELD_BYTES`."""
_MOST_HELD_BYTES: Final = 192 << 20
"""Rows in memory for one row group: more than a group's size only if values repeat a lot."""
_GROUPS_PER_FILE: Final = 2  # at least, so that files are more than half full
_FILE_FRAME_BYTES: Final = 1 << 12  # magic bytes and the footer's own head
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

    def write(self, writer: pq.ParquetWriter) -> None:
        writer.write_table(self.rows, row_group_size=max(1, self.rows.num_rows))


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
        found = RowGroup.of(pa.concat_tables(kept))
        times = most * 3 / 4 / max(1, found.num_bytes)
        enough_held = min(most_held, max(1, int(num_held * times)))
        if found.num_bytes * 2 < most and num_held < enough_held:
            continue
        kept, counted, num_held = [], set(), 0
        yield from _split(found, most)
        del found
    if kept:
        yield from fit(pa.concat_tables(kept), most_file_bytes)


def fit(rows: pa.Table, most_file_bytes: int | None) -> Iterator[RowGroup]:
    """The rows in one row group, or in several if they exceed its size."""
    if rows.num_rows:
        yield from _split(RowGroup.of(rows), _most_group_bytes(most_file_bytes))


class Room:
    """Tracks what still fits into a file."""

    def __init__(self, most_bytes: int | None) -> None:
        """`most_bytes` is the upper bound of the file's size; None for any size."""
        self._most_bytes = most_bytes
        self._footer_bytes = _FILE_FRAME_BYTES
        self._is_empty = True

    def takes(self, group: RowGroup, position: int) -> bool:
        """Whether a group fits at `position`; if so, it counts as written.

        The first group always fits: a single row can't be cut.
        """
        footer_bytes = self._footer_bytes + group.footer_bytes
        end = position + int(group.num_bytes * _MOST_GROWTH) + footer_bytes
        if not self._is_empty and self._most_bytes is not None and end > self._most_bytes:
            return False
        self._footer_bytes, self._is_empty = footer_bytes, False
        return True


class _Files:
    """Writes local files, one after the other; used as a context manager."""

    def __init__(self, folder: Path, schema: pa.Schema, most_bytes: int | None) -> None:
        self.paths: list[Path] = []
        self._folder, self._schema, self._most_bytes = folder, schema, most_bytes
        self._open_ones = ExitStack()
        self._begin()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open_ones.close()

    def write(self, group: RowGroup) -> None:
        if not self._room.takes(group, self._file.tell()):
            self._open_ones.close()
            self._begin()
            self._room.takes(group, 0)
        group.write(self._writer)

    def _begin(self) -> None:
        self.paths.append(self._folder / f"{len(self.paths):05d}.parquet")
        self._room = Room(self._most_bytes)
        self._file = self._open_ones.enter_context(pa.OSFile(str(self.paths[-1]), "wb"))
        self._writer = self._open_ones.enter_context(
            pq.ParquetWriter(self._file, self._schema, compression="zstd")
        )


def write_files(
    groups: Iterable[RowGroup], folder: Path, schema: pa.Schema, most_bytes: int | None
) -> list[Path]:
    """Write row groups to new files in the local `folder`, which is created; at least one file.

    Names sort in row order. A file has at most `most_bytes`, unless one row has more; None for
    one file of any size. Two groups are in memory: one is written while the next is made.
    """
    folder.mkdir()
    with _Files(folder, schema, most_bytes) as files:
        for _ in ahead(groups, files.write, num_threads=1):
            pass
    return files.paths


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
