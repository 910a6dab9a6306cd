"""Sorts rows of tokens or other symbols in memory, and finds the LCPs of neighbours.

Rows that may still be equal are neighbours in one array of row indexes. They are read together as
far as they agree; a stable sort by the next symbol then brings those together that still agree. A
row is read about once, and only as far as it is shared, so the work is linear in the number of
shared symbols, plus one small sort wherever rows diverge. There is no recursion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.prefixes.token_table import TokenTable

_INSERTION_SORT_BELOW = 48  # rows; a radix pass over 256 counters costs more below this
_FIRST_WINDOW = 16  # symbols
_COMPARE_STRIDE = 16  # symbols compared per branch, so that the compiler can use vectors


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """Rows in lexicographic order, a row before its extensions, equal rows by index.

    Attributes:
        row_idxs: [num_rows] int64, the row at each rank.
        num_shared: [num_rows] int64, LCP of each with the one before.
    """

    row_idxs: NDArray[np.int64]
    num_shared: NDArray[np.int64]


def sort_rows(rows: TokenTable) -> SortedRows:
    """Sorts rows; takes up to 60 more bytes per row."""
    return SortedRows(*_sort_rows(rows.token_ids, rows.offsets))


@compiled
def _sort_rows(
    symbols: NDArray[np.int32], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row at each rank, and its LCP with the one before.

    Keeps a stack of (begin, end, depth): ranks of rows that share more than `depth` symbols.
    """
    num_rows = len(offsets) - 1
    ranked = np.arange(num_rows)
    num_shared = np.empty(num_rows, dtype=np.int64)
    branch_keys = np.empty(num_rows, dtype=np.uint32)
    scratch_idxs = np.empty(num_rows, dtype=np.int64)
    scratch_keys = np.empty(num_rows, dtype=np.uint32)
    stack = np.empty((num_rows // 2 + 1, 3), dtype=np.int64)  # disjoint ranges of two and more
    num_stacked = 0
    if num_rows > 0:
        num_shared[0] = 0
    begin, end, depth = 0, num_rows, 0
    while True:
        keys, idxs = branch_keys[begin:end], ranked[begin:end]
        _read_keys(symbols, offsets, idxs, depth, keys)
        _sort_by_key(keys, idxs, scratch_keys, scratch_idxs)
        num_shared[begin + 1 : end] = depth
        num_stacked = _push_equal(stack, num_stacked, keys, begin, depth)
        if num_stacked == 0:
            return ranked, num_shared
        num_stacked -= 1
        begin, end, depth = stack[num_stacked]
        depth = _common_depth(symbols, offsets, ranked[begin:end], depth + 1)


@compiled
def _common_depth(
    symbols: NDArray[np.int32],
    offsets: NDArray[np.int64],
    idxs: NDArray[np.int64],
    known_depth: int,
) -> int:
    """Symbols that all rows of `idxs` share, given that they share `known_depth`.

    Looks ahead by windows that double, so that a pair of rows with a long LCP costs little if a
    third one diverges early.
    """
    first = offsets[idxs[0]]
    common, window_end = known_depth, known_depth
    window = _FIRST_WINDOW
    while common == window_end:
        window_end = min(common + window, int(offsets[idxs[0] + 1] - first))
        if window_end == common:  # the first row ends here
            break
        shared_end = window_end
        for position in range(1, len(idxs)):
            begin = offsets[idxs[position]]
            shared_end = min(shared_end, int(offsets[idxs[position] + 1] - begin))
            shared_end = common + num_equal(
                symbols[first + common : first + shared_end],
                symbols[begin + common : begin + shared_end],
            )
            if shared_end == common:
                break
        common = shared_end
        window *= 2
    return common


@compiled
def num_equal(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Length of the common prefix of two arrays of equal length."""
    num_equal = 0
    while num_equal + _COMPARE_STRIDE <= len(left):
        differing = np.int32(0)
        left_chunk = left[num_equal : num_equal + _COMPARE_STRIDE]
        right_chunk = right[num_equal : num_equal + _COMPARE_STRIDE]
        for position in range(_COMPARE_STRIDE):
            differing |= left_chunk[position] ^ right_chunk[position]
        if differing != 0:
            break
        num_equal += _COMPARE_STRIDE
    while num_equal < len(left) and left[num_equal] == right[num_equal]:
        num_equal += 1
    return num_equal


@compiled
def _read_keys(
    symbols: NDArray[np.int32],
    offsets: NDArray[np.int64],
    idxs: NDArray[np.int64],
    depth: int,
    keys: NDArray[np.uint32],
) -> None:
    """The symbol after `depth` plus one; 0 for a row that ends there, so it sorts first."""
    for position in range(len(idxs)):
        begin = offsets[idxs[position]] + depth
        if begin < offsets[idxs[position] + 1]:
            keys[position] = np.uint32(symbols[begin]) + np.uint32(1)
        else:
            keys[position] = np.uint32(0)


@compiled
def _push_equal(
    stack: NDArray[np.int64], num_stacked: int, keys: NDArray[np.uint32], begin: int, depth: int
) -> int:
    """Pushes each range of at least two equal keys, except rows that end here."""
    start = 0
    while start < len(keys):
        stop = start + 1
        while stop < len(keys) and keys[stop] == keys[start]:
            stop += 1
        if stop - start > 1 and keys[start] != 0:
            stack[num_stacked, 0] = begin + start
            stack[num_stacked, 1] = begin + stop
            stack[num_stacked, 2] = depth
            num_stacked += 1
        start = stop
    return num_stacked


@compiled
def _sort_by_key(
    keys: NDArray[np.uint32],
    idxs: NDArray[np.int64],
    scratch_keys: NDArray[np.uint32],
    scratch_idxs: NDArray[np.int64],
) -> None:
    """Sorts both arrays by key in place, stable. The scratch arrays are at least as long."""
    differing = np.uint32(0)
    is_sorted = True
    for position in range(1, len(keys)):
        differing |= keys[position] ^ keys[0]
        is_sorted = is_sorted and keys[position - 1] <= keys[position]
    if is_sorted:
        return
    if len(keys) < _INSERTION_SORT_BELOW:
        _insertion_sort(keys, idxs)
        return
    for shift in range(0, 32, 8):
        if (differing >> np.uint32(shift)) & np.uint32(255):
            _radix_pass(keys, idxs, scratch_keys, scratch_idxs, np.uint32(shift))


@compiled
def _insertion_sort(keys: NDArray[np.uint32], idxs: NDArray[np.int64]) -> None:
    for position in range(1, len(keys)):
        key, idx = keys[position], idxs[position]
        slot = position
        while slot > 0 and keys[slot - 1] > key:
            keys[slot], idxs[slot] = keys[slot - 1], idxs[slot - 1]
            slot -= 1
        keys[slot], idxs[slot] = key, idx


@compiled
def _radix_pass(
    keys: NDArray[np.uint32],
    idxs: NDArray[np.int64],
    scratch_keys: NDArray[np.uint32],
    scratch_idxs: NDArray[np.int64],
    shift: np.uint32,
) -> None:
    """One counting sort by the eight bits above `shift`."""
    starts = np.zeros(257, dtype=np.int64)
    for position in range(len(keys)):
        starts[((keys[position] >> shift) & np.uint32(255)) + 1] += 1
    for digit in range(256):
        starts[digit + 1] += starts[digit]
    for position in range(len(keys)):
        digit = (keys[position] >> shift) & np.uint32(255)
        scratch_keys[starts[digit]] = keys[position]
        scratch_idxs[starts[digit]] = idxs[position]
        starts[digit] += 1
    keys[:] = scratch_keys[: len(keys)]
    idxs[:] = scratch_idxs[: len(idxs)]
