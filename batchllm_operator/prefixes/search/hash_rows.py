"""Rows of segment hashes of all prompts, in bounded memory.

Rows are stored in one array. When they outgrow it, every second hash of each row is dropped:
because hashes are chained, the rest is a row over segments of twice the tokens. Coarser rows
change the work, not the result: more tokens are compared where prompts diverge.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.search.lcp_tree import RankedPrompts, are_repeats
from batchllm_operator.prefixes.search.row_sort import sort_rows
from batchllm_operator.prefixes.search.segment_hashes import HASH_SYMBOLS, SegmentHasher
from batchllm_operator.prefixes.token_table import TokenTable

_SYMBOL_BYTES = 4
_FIRST_SYMBOLS = 1 << 16
_MOST_RESERVED_SYMBOLS = 1 << 28


class HashRows:
    """Stores the rows of prompts, and sorts them once.

    Args:
        hasher: makes the rows.
        max_bytes: upper bound, unless one hash per prompt is more; None for no bound.

    Attributes:
        segment_tokens: tokens per segment; doubles when memory is short.
    """

    def __init__(self, hasher: SegmentHasher, max_bytes: int | None) -> None:
        self.segment_tokens = hasher.segment_tokens
        self._hasher = hasher
        self._max_symbols = None if max_bytes is None else max_bytes // _SYMBOL_BYTES
        # With a bound, all of it at once: pages are taken as they fill, and nothing is copied.
        capacity = _FIRST_SYMBOLS if self._max_symbols is None else self._max_symbols
        self._symbols = _mapped(min(capacity, _MOST_RESERVED_SYMBOLS))
        self._num_symbols = 0
        self._longest_row = 0
        self._lengths: list[NDArray[np.int64]] = []

    def add(self, tokens: TokenTable) -> None:
        """Add the next prompts."""
        rows = self._hasher.rows(tokens)
        segment_tokens = self._hasher.segment_tokens
        while segment_tokens < self.segment_tokens:
            rows, segment_tokens = _halved(rows), 2 * segment_tokens
        self._longest_row = max(self._longest_row, int(rows.lengths.max(initial=0)))
        while self._is_full(rows) and self._longest_row > HASH_SYMBOLS:
            self._halve()
            rows = _halved(rows)
        end = self._num_symbols + rows.num_tokens
        if end > len(self._symbols):
            larger = _mapped(max(end, 2 * len(self._symbols)))
            larger[: self._num_symbols] = self._symbols[: self._num_symbols]
            self._symbols = larger
        self._symbols[self._num_symbols : end] = rows.token_ids
        self._num_symbols = end
        self._lengths.append(rows.lengths)

    def sort(self, lengths: NDArray[np.int64]) -> RankedPrompts:
        """Sort the prompts; neighbours' shared tokens are those of full segments.

        Frees the rows.

        Args:
            lengths: [num_prompts] int64, tokens by prompt index.
        """
        rows = self._rows()
        found = sort_rows(rows)
        is_repeat = are_repeats(found.num_shared, rows.lengths[found.row_idxs])
        self._symbols, self._num_symbols, self._lengths = _mapped(0), 0, []
        shared = _shared_tokens(found.num_shared, lengths[found.row_idxs], self.segment_tokens)
        return RankedPrompts(found.row_idxs, shared, is_repeat)

    def _is_full(self, rows: TokenTable) -> bool:
        num_symbols = self._num_symbols + rows.num_tokens
        return self._max_symbols is not None and num_symbols > self._max_symbols

    def _halve(self) -> None:
        """Drops every second hash of all rows that have more than one."""
        rows = _halved(self._rows())
        self._num_symbols, self._lengths = rows.num_tokens, [rows.lengths]
        self._longest_row = -(-self._longest_row // (2 * HASH_SYMBOLS)) * HASH_SYMBOLS
        self.segment_tokens *= 2

    def _rows(self) -> TokenTable:
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        return TokenTable.unchecked(self._symbols[: self._num_symbols], np.cumsum(lengths))


def _halved(rows: TokenTable) -> TokenTable:
    """Every second hash of each row and its last, for segments twice as long. In place."""
    num_hashes = rows.lengths // HASH_SYMBOLS
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum((num_hashes + 1) // 2 * HASH_SYMBOLS, out=offsets[1:])
    _keep_second_hashes(rows.token_ids, rows.offsets, offsets)
    return TokenTable.unchecked(rows.token_ids[: offsets[-1]], offsets)


def _mapped(num_symbols: int) -> NDArray[np.int32]:
    """Zeros whose memory is allocated page by page on the first write.

    `np.empty` asks for huge pages, which take much longer to get one by one.
    """
    num_bytes = max(num_symbols, 1) * _SYMBOL_BYTES
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.int32, count=num_symbols)


@compiled
def _keep_second_hashes(
    symbols: NDArray[np.int32], offsets: NDArray[np.int64], kept_offsets: NDArray[np.int64]
) -> None:
    for row in range(len(offsets) - 1):
        last = offsets[row + 1] - HASH_SYMBOLS
        source = offsets[row] + HASH_SYMBOLS
        for place in range(kept_offsets[row], kept_offsets[row + 1], HASH_SYMBOLS):
            begin = min(source, last)
            symbols[place], symbols[place + 1] = symbols[begin], symbols[begin + 1]
            source += 2 * HASH_SYMBOLS


@compiled
def _shared_tokens(
    num_shared_symbols: NDArray[np.int64], lengths: NDArray[np.int64], segment_tokens: int
) -> NDArray[np.int64]:
    num_tokens = np.zeros(len(lengths), dtype=np.int64)
    num_full_before = 0
    for position in range(len(lengths)):
        num_full = lengths[position] // segment_tokens
        num_segments = min(num_shared_symbols[position] // HASH_SYMBOLS, num_full, num_full_before)
        num_tokens[position] = num_segments * segment_tokens
        num_full_before = num_full
    return num_tokens
