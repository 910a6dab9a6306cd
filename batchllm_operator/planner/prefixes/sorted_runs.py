"""Rows of symbols sorted on disk, with what neighbours share (an LCP merge sort).

Rows are gathered up to a bound of memory, sorted, and written as a run. At the end all runs
are merged at once. Each run keeps with each row what it shares with the one before, and the
merge keeps for each run what its next row shares with the row put out last. Where these
numbers differ, they decide which row is next without a look at the rows (Ng and Kakehi,
"Merging string sequences by longest common prefixes", 2008).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.jit import compiled
from batchllm_operator.planner.prefixes.row_sort import SortedRows, num_equal, sort_rows
from batchllm_operator.planner.token_table import TokenTable

Advance = Callable[[int], None]
"""Called with the number of prompts done since the last call, for a progress display."""

_HEADER = 3  # of a row in a run: prompt index, number of symbols, number shared with the one before
_INDEX, _LENGTH, _SHARED = range(_HEADER)
_SYMBOL_BYTES = 4
_FIRST_SYMBOLS = 1 << 16
_MOST_RESERVED_SYMBOLS = 1 << 28
_WRITE_SYMBOLS = 1 << 20
_MAX_BUFFER_BYTES = 128 << 20  # reads don't get any better with more
_NOTHING, _LATER = -1, -1
_SORT_BYTES_PER_ROW = 80  # what sorting a run takes, and the row's offset and length


def ignore(_: int) -> None:
    """An `Advance` that shows nothing."""


class RowSorter:
    """Sorts rows, of which only some are in memory at a time.

    Rows are numbered as they are added. A sorter sorts once, and removes its runs then; one that
    doesn't come to that needs a `close`.

    Args:
        folder: where runs are written, if the rows don't fit into `run_bytes`; None to keep
            all in memory.
        run_bytes: about what the rows in memory and their sorting may take.
        merge_bytes: about what reading the runs may take. A merge needs room for the longest
            row of each run; `min_merge_bytes` says for how much.
        name: what the names of the runs' files begin with.

    Raises:
        OSError: from `add` and `sort`, such as a disk that is full.
    """

    def __init__(
        self, folder: Path | None, *, run_bytes: int, merge_bytes: int, name: str = "run"
    ) -> None:
        self._folder = folder
        self._name = name
        self._run_bytes = run_bytes
        self._merge_bytes = merge_bytes
        # With a bound, room for a run at once: it takes memory as it fills, and nothing is copied.
        bounded = min(run_bytes // _SYMBOL_BYTES + 1, _MOST_RESERVED_SYMBOLS)
        capacity = _FIRST_SYMBOLS if folder is None else bounded
        self._symbols = _mapped(capacity)
        self._num_symbols = 0
        self._lengths: list[NDArray[np.int64]] = []  # of the rows in memory
        self._num_in_memory = 0
        self._num_rows = 0
        self._runs: list[Path] = []
        self._longest_row = 0

    @property
    def min_merge_bytes(self) -> int:
        """What reading the runs takes at least."""
        num_runs = len(self._runs) + bool(self._lengths) if self._runs else 0
        return num_runs * (self._longest_row + _HEADER) * _SYMBOL_BYTES

    def add(self, rows: TokenTable) -> None:
        """Take rows in, and write a run where memory is full."""
        if len(rows) == 0:
            return
        end = self._num_symbols + rows.num_tokens
        if end > len(self._symbols) and self._folder is not None and self._lengths:
            self._write_run(self._folder)
            end = rows.num_tokens
        if end > len(self._symbols):
            self._reserve(end)
        self._symbols[self._num_symbols : end] = rows.token_ids
        self._num_symbols = end
        self._lengths.append(rows.lengths)
        self._num_in_memory += len(rows)
        self._longest_row = max(self._longest_row, int(self._lengths[-1].max()))
        num_bytes = end * _SYMBOL_BYTES + _SORT_BYTES_PER_ROW * self._num_in_memory
        if self._folder is not None and num_bytes >= self._run_bytes:
            self._write_run(self._folder)

    def _reserve(self, num_symbols: int) -> None:
        """Make room for so many symbols in all."""
        larger = _mapped(max(num_symbols, 2 * len(self._symbols)))
        larger[: self._num_symbols] = self._symbols[: self._num_symbols]
        self._symbols = larger

    def sort(self, advance: Advance) -> SortedRows:
        """All rows in order; `advance` is called with the rows done since its last call."""
        if not self._runs:
            result = sort_rows(self._take_rows())
            self._symbols = np.empty(0, dtype=np.int32)
            advance(len(result.row_idxs))
            return result
        if self._lengths and self._folder is not None:
            self._write_run(self._folder)
        self._symbols = np.empty(0, dtype=np.int32)
        row_idxs = np.empty(self._num_rows, dtype=np.int64)
        num_shared = np.empty(self._num_rows, dtype=np.int64)
        with _RunReader(self._runs, self._merge_bytes, self._longest_row + _HEADER) as reader:
            num_done = 0
            while reader.fill():
                num_before = num_done
                num_done = _merge(
                    reader.buffers,
                    reader.begins,
                    reader.ends,
                    reader.is_exhausted,
                    reader.shared,
                    row_idxs,
                    num_shared,
                    num_done,
                )
                advance(num_done - num_before)
        self.close()
        return SortedRows(row_idxs, num_shared)

    def close(self) -> None:
        """Remove the runs. What isn't sorted by now never will be."""
        for path in self._runs:
            path.unlink(missing_ok=True)
        self._runs = []

    def _take_rows(self) -> TokenTable:
        """The rows in memory, as a view that is good until rows are added."""
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        rows = TokenTable.unchecked(self._symbols[: self._num_symbols], np.cumsum(lengths))
        self._num_symbols, self._num_in_memory, self._lengths = 0, 0, []
        return rows

    def _write_run(self, folder: Path) -> None:
        rows = self._take_rows()
        first_row, self._num_rows = self._num_rows, self._num_rows + len(rows)
        ranked = sort_rows(rows)
        path = folder / f"{self._name}-{len(self._runs):05d}.bin"
        self._runs.append(path)
        sizes = rows.lengths[ranked.row_idxs] + _HEADER
        with path.open("xb") as file:
            for start, stop in _pieces(sizes):
                piece = np.empty(sizes[start:stop].sum(), dtype=np.int32)
                _pack(
                    rows.token_ids,
                    rows.offsets,
                    ranked.row_idxs[start:stop],
                    ranked.num_shared[start:stop],
                    first_row,
                    piece,
                )
                file.write(piece.data)


class _RunReader:
    """Buffers over all runs: row `r` has what was read of run `r` and not yet put out.

    Attributes:
        buffers: [num_runs, size] int32.
        begins: [num_runs] int64, the next row of each run in its buffer.
        ends: [num_runs] int64, where what was read ends.
        is_exhausted: [num_runs] bool, whether all of the run has been read.
        shared: [num_runs] int64, symbols that the next row shares with the one put out last;
            -1 where the next row hasn't been looked at.
    """

    def __init__(self, paths: list[Path], num_bytes: int, longest_row: int) -> None:
        num_bytes = min(num_bytes, _MAX_BUFFER_BYTES)
        size = max(longest_row, num_bytes // (len(paths) * _SYMBOL_BYTES))
        self._paths = paths
        self._files: list[FileIO] = []
        self.buffers = np.empty((len(paths), size), dtype=np.int32)
        self.begins = np.zeros(len(paths), dtype=np.int64)
        self.ends = np.zeros(len(paths), dtype=np.int64)
        self.is_exhausted = np.zeros(len(paths), dtype=np.bool_)
        self.shared = np.full(len(paths), _LATER, dtype=np.int64)

    def __enter__(self) -> _RunReader:
        self._files = [path.open("rb", buffering=0) for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def fill(self) -> bool:
        """Read on wherever a row isn't whole; whether there are rows left."""
        for run, file in enumerate(self._files):
            buffer, begin, end = self.buffers[run], self.begins[run], self.ends[run]
            if self.is_exhausted[run] or _has_row(buffer, begin, end):
                continue
            rest = end - begin
            buffer[:rest] = buffer[begin:end].copy()
            view = buffer.view(np.uint8).data
            num_bytes = rest * buffer.itemsize
            while num_bytes < len(view) and (num_read := file.readinto(view[num_bytes:])):
                num_bytes += num_read
            self.begins[run], self.ends[run] = 0, num_bytes // buffer.itemsize
            self.is_exhausted[run] = num_bytes < len(view)
            if self.is_exhausted[run] and num_bytes and not _has_row(buffer, 0, self.ends[run]):
                raise PlanError(f"{self._paths[run]}: was changed while it was in use")
        return bool(np.any(self.begins < self.ends))


def _pieces(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `_WRITE_SYMBOLS` each."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + _WRITE_SYMBOLS, side="right"))
        stop = max(start + 1, stop)
        yield start, stop
        start = stop


def _mapped(num_symbols: int) -> NDArray[np.int32]:
    """Zeros that take memory page by page as they are written to.

    `np.empty` asks for huge pages, and one of them at a time takes much longer to be had.
    """
    num_bytes = max(num_symbols, 1) * _SYMBOL_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.int32, count=num_symbols)


@compiled
def _pack(
    symbols: NDArray[np.int32],
    offsets: NDArray[np.int64],
    row_idxs: NDArray[np.int64],
    shared: NDArray[np.int64],
    first_row: int,
    packed: NDArray[np.int32],
) -> None:
    place = 0
    for position in range(len(row_idxs)):
        idx = row_idxs[position]
        row = symbols[offsets[idx] : offsets[idx + 1]]
        packed[place + _INDEX] = np.int32(first_row + idx)
        packed[place + _LENGTH] = np.int32(len(row))
        packed[place + _SHARED] = np.int32(shared[position])
        packed[place + _HEADER : place + _HEADER + len(row)] = row
        place += _HEADER + len(row)


@compiled
def _has_row(buffer: NDArray[np.int32], begin: int, end: int) -> bool:
    """Whether a whole row lies between `begin` and `end`."""
    return end - begin >= _HEADER and end - begin >= _HEADER + buffer[begin + _LENGTH]


@compiled
def _next_row(buffer: NDArray[np.int32], begin: int) -> NDArray[np.int32]:
    """The symbols of the row at `begin`."""
    return buffer[begin + _HEADER : begin + _HEADER + buffer[begin + _LENGTH]]


@compiled
def _common(left: NDArray[np.int32], right: NDArray[np.int32], known: int) -> int:
    """Symbols that two rows share, given that they share `known`."""
    end = min(len(left), len(right))
    return known + num_equal(left[known:end], right[known:end])


@compiled
def _is_first(
    buffers: NDArray[np.int32],
    begins: NDArray[np.int64],
    shared: NDArray[np.int64],
    run: int,
    other: int,
) -> bool:
    """Whether the next row of `run` is before that of an earlier run, and not equal to it.

    All rows that are left are at or behind the one put out last, so the one that shares more
    with that is before the other.
    """
    if shared[run] != shared[other]:
        return bool(shared[run] > shared[other])
    row = _next_row(buffers[run], begins[run])
    other_row = _next_row(buffers[other], begins[other])
    common = _common(row, other_row, shared[run])
    if common == len(other_row):
        return False
    return common == len(row) or bool(row[common] < other_row[common])


@compiled
def _merge(
    buffers: NDArray[np.int32],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    is_exhausted: NDArray[np.bool_],
    shared: NDArray[np.int64],
    row_idxs: NDArray[np.int64],
    num_shared: NDArray[np.int64],
    num_done: int,
) -> int:
    """Puts out rows until a run's next row isn't in its buffer; returns how many are out.

    Moves `begins` on, and keeps `shared` for the next call.
    """
    while True:
        best = _NOTHING
        for run in range(len(begins)):
            if begins[run] == ends[run] and is_exhausted[run]:
                continue
            if not _has_row(buffers[run], begins[run], ends[run]):
                return num_done
            if shared[run] == _LATER:
                shared[run] = buffers[run, begins[run] + _SHARED]
            if best == _NOTHING or _is_first(buffers, begins, shared, run, best):
                best = run
        if best == _NOTHING:
            return num_done
        row = _next_row(buffers[best], begins[best])
        row_idxs[num_done] = buffers[best, begins[best] + _INDEX]
        num_shared[num_done] = shared[best]
        num_done += 1
        for run in range(len(begins)):
            if run == best or begins[run] == ends[run]:
                continue
            if shared[run] == shared[best]:
                shared[run] = _common(_next_row(buffers[run], begins[run]), row, shared[run])
            else:
                shared[run] = min(shared[run], shared[best])
        begins[best] += _HEADER + len(row)
        shared[best] = _LATER
