"""An order of fields for each row of a table, so that prompts share long prefixes.

Rows share what comes first in both: the same fields, in the same order. So the orders of all rows
form a tree, and each field that a row finds in it already is saved. It is grown from the root: at a
node, values are taken by what their rows would save with all fields in which they agree, as GGR
does (Liu et al., "Optimizing LLM queries in relational data analytics workloads", MLSys 2025). Of
these fields, the one that most rows of the node have comes first; rows that begin alike are a
child, where all is chosen again. Lengths are in bytes, which need no tokenizer. If one order for
all rows saves as much, all have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes.field_tree import FieldTable, Scratch, grow_orders
from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled

ORDERING_BYTES: Final = 64
"""Most memory per field of a row, at the peak."""
_MAX_SEARCHED_ROWS: Final = 1 << 25
_BEAM: Final = 70  # exact for up to eight fields
_FNV_PRIME = np.uint64(0x100000001B3)
_MIX = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]
Orders = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class FieldOrders:
    """The orders of rows, and what they save.

    Attributes:
        orders: [num_rows, num_fields] uint8, each row's fields, the first one first.
        num_orders: distinct orders.
        single: the best order for all rows; of many rows and fields, the best that was found.
        num_bytes: of all fields.
        num_shared_bytes: of those that an earlier row has with the same fields before it.
        num_single_bytes: the same if all rows had the order `single`.
    """

    orders: Orders
    num_orders: int
    single: tuple[int, ...]
    num_bytes: int
    num_shared_bytes: int
    num_single_bytes: int

    @classmethod
    def of(cls, hashes: Hashes, lengths: Int32s) -> "FieldOrders":
        """Choose orders.

        Args:
            hashes: [num_fields, num_rows], different for different texts and fields.
            lengths: [num_rows, num_fields], at most 16 fields.
        """
        num_rows, num_fields = lengths.shape
        single, saved = _swapped(hashes, lengths, _best_single(hashes, lengths))
        table = FieldTable.of(hashes, lengths)
        scratch, shared = Scratch.of(table), saved
        orders = np.empty((num_rows, num_fields), dtype=np.uint8)
        orders[:] = single
        for by_mean in (False, True):
            grown = np.empty_like(orders)
            more = grow_orders(table, np.array(single, np.int64), by_mean, grown, scratch)
            if more > shared:
                orders, shared = grown, int(more)
        places = np.arange(num_fields, dtype=np.uint64) * np.uint64(4)
        numbers = (orders.astype(np.uint64) << places).sum(axis=1, dtype=np.uint64)
        num_bytes = int(lengths.sum(dtype=np.int64))
        return cls(orders, len(np.unique(numbers)), single, num_bytes, shared, saved)


def hash_texts(offsets: Int64s, data: NDArray[np.uint8], seed: int) -> Hashes:
    """A hash of each text: [num_texts].

    Args:
        offsets: [num_texts + 1] int64 into `data`, its bytes.
        seed: for other hashes of the same texts.
    """
    return _hash_texts(offsets, data, np.uint64(seed * int(_MIX) % 2**64))


@compiled
def _hash_texts(offsets: Int64s, data: NDArray[np.uint8], start: np.uint64) -> Hashes:
    hashes = np.empty(len(offsets) - 1, dtype=np.uint64)
    for idx in range(len(hashes)):
        value = start
        for place in range(offsets[idx], offsets[idx + 1]):
            value = (value ^ np.uint64(data[place])) * _FNV_PRIME
        for _ in range(2):  # sums of hashes stand for sets of fields, so no bit may be linear
            value = (value ^ (value >> np.uint64(32))) * _MIX
        hashes[idx] = value ^ (value >> np.uint64(32))
    return hashes


def _best_single(hashes: Hashes, lengths: Int32s) -> tuple[int, ...]:
    """The order that saves most if all rows have it, by the first rows if there are many.

    What a field saves depends only on the set of fields before it, so sets are searched: all of
    them, or the best of each size.
    """
    num_fields = len(hashes)
    num_sets = min(1 << num_fields, _BEAM * num_fields**2)
    hashes = hashes[:, : _MAX_SEARCHED_ROWS // num_sets]
    lengths = lengths[: hashes.shape[1]]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(num_fields):
        larger: dict[int, tuple[int, tuple[int, ...]]] = {}
        repeated: dict[int, Int64s] = {}
        for fields, (saved, order) in best.items():
            for field in range(num_fields):
                if fields >> field & 1:
                    continue
                more = fields | 1 << field
                if more not in repeated:
                    key = hashes[[*order, field]].sum(axis=0, dtype=np.uint64)
                    repeated[more] = _repeated(key, lengths)
                total = saved + int(repeated[more][field])
                if more not in larger or total > larger[more][0]:
                    larger[more] = total, (*order, field)
        kept = sorted(larger.items(), key=lambda item: -item[1][0])[:_BEAM]
        best = dict(kept)
    [(_, order)] = best.values()
    return order


def _swapped(
    hashes: Hashes, lengths: Int32s, order: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """The order after swaps of neighbours that save more if all rows have it, and what it saves.

    The first rows of a large table repeat less than all of them do.
    """
    repeated: dict[frozenset[int], Int64s] = {}

    def saved(order: Sequence[int]) -> int:
        total = 0
        for end, field in enumerate(order, 1):
            fields = frozenset(order[:end])
            if fields not in repeated:
                key = hashes[[*fields]].sum(axis=0, dtype=np.uint64)
                repeated[fields] = _repeated(key, lengths)
            total += int(repeated[fields][field])
        return total

    before, best = -1, saved(order)
    while best > before:
        before = best
        for place in range(len(order) - 1):
            other = (*order[:place], order[place + 1], order[place], *order[place + 2 :])
            if (more := saved(other)) > best:
                best, order = more, other
    return order, best


@compiled
def _repeated(keys: Hashes, lengths: Int32s) -> Int64s:
    """Sums of the lengths of rows whose key an earlier row has: [num_fields]."""
    size = 2
    while size < 2 * len(keys):
        size *= 2
    slots = np.zeros(size, dtype=np.uint64)  # 0 is free
    sums = np.zeros(lengths.shape[1], dtype=np.int64)
    for row in range(len(keys)):
        key = keys[row] | np.uint64(1)
        place = np.int64(key >> np.uint64(16)) & (size - 1)
        while slots[place] != 0 and slots[place] != key:
            place = (place + 1) & (size - 1)
        if slots[place] == key:
            sums += lengths[row]
        slots[place] = key
    return sums
