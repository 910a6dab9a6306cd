"""Sorts prompts that may be on disk, and finds what neighbours share.

It is a multikey quicksort (Bentley and Sedgewick, *Fast Algorithms for Sorting and Searching
Strings*, 1997) that keeps the LCPs and reads a prompt only as far as others share it:

    family      prompts that share their first `depth` tokens, all of them at first
    one round   each prompt is compared with its family's pivot from `depth` on, window by window;
                a family is sorted by where its prompts part from the pivot, and by their next token
    next        prompts that part at the same place with the same token are a family, one deeper

A round treats many families at once. Memory holds some numbers per prompt and a few chunks of
tokens. Pivots are drawn at random, so that no usual order of rows takes many rounds. The result
doesn't depend on them, nor on how many tokens are read at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from batchllm_operator.prefixes.jit import Int32s, Int64s, compiled
from batchllm_operator.prefixes.prefix_tree import PrefixTree, RankedPrompts
from batchllm_operator.prefixes.prompt_store import CHUNK_TOKENS, Prompts, chunks, read_ahead
from batchllm_operator.prefixes.token_table import TokenTable

_FIRST_WINDOW: Final = 64  # tokens; each further one is `_WIDER` times as large, up to a chunk
_WIDER: Final = 4
_ROUND_PROMPTS: Final = 1 << 16
"""Prompts of a round once families are smaller, so that rounds read what the last one has read."""
_COMPARE_STRIDE: Final = 16  # tokens compared per branch, so that the compiler can use vectors
_TOKEN_BITS: Final = 32
_TOKEN: Final = (1 << _TOKEN_BITS) - 1
"""Of a key: its lower half, a token plus 1; 0 where the prompt ends."""
_PIVOT: Final = 1 << 30
"""The upper half of a pivot's key; below it are the places where smaller prompts part."""


def sort_prompts(
    prompts: Prompts, advance: Callable[[int], object] = lambda _: None
) -> RankedPrompts:
    """The prompts in lexicographic order, equal ones by index, with their LCPs.

    Args:
        advance: called with the number of prompts done since the last call.

    Raises `OSError`: the prompts can't be read.
    """
    order, shared = np.arange(len(prompts)), np.zeros(len(prompts), dtype=np.int64)
    generator = np.random.default_rng(0)
    rounds = list(_Families(order.copy(), shared.copy(), shared.copy()).split())
    while rounds:
        families = rounds.pop()
        rest = families.sort(prompts, order, shared, generator)
        advance(len(families.ranks) - len(rest.ranks))
        rounds.extend(rest.split())
    return RankedPrompts(order, shared)


def build_prefix_tree(tokens: TokenTable) -> PrefixTree:
    """Every common prefix of prompts in memory."""
    return sort_prompts(tokens).tree(tokens.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class _Families:
    """Families side by side.

    Attributes:
        ranks: [n] int64, ascending; those of a family are consecutive.
        numbers: [n] int64, the family of each, ascending.
        depths: [n] int64, tokens that the family's prompts share at least.
    """

    ranks: Int64s
    numbers: Int64s
    depths: Int64s

    def split(self) -> Iterator[_Families]:
        """The same families in parts of about `_ROUND_PROMPTS`; a larger family is a part."""
        start = 0
        while start < len(self.ranks):
            last = self.numbers[min(start + _ROUND_PROMPTS, len(self.ranks)) - 1]
            stop = int(np.searchsorted(self.numbers, last, side="right"))
            part = slice(start, stop)
            yield _Families(self.ranks[part], self.numbers[part], self.depths[part])
            start = stop

    def sort(
        self, prompts: Prompts, order: Int64s, shared: Int64s, generator: np.random.Generator
    ) -> _Families:
        """Sort each family by its pivot, in `order` and `shared`; returns the deeper families."""
        idxs = order[self.ranks]
        keys, common = self._compare(prompts, idxs, generator)
        sorting = np.lexsort((keys, self.numbers))
        keys, common = keys[sorting], common[sorting]
        order[self.ranks] = idxs[sorting]
        has_before = np.diff(self.numbers, prepend=-1) == 0
        behind = np.flatnonzero(has_before)
        shared[self.ranks[behind]] = np.minimum(common[behind], common[behind - 1])
        goes_on = has_before & (np.diff(keys, prepend=-1) == 0) & (keys & _TOKEN > 0)
        rest = np.flatnonzero(goes_on | np.append(goes_on[1:], False))
        return _Families(self.ranks[rest], np.cumsum(~goes_on[rest]), common[rest] + 1)

    def _compare(
        self, prompts: Prompts, idxs: Int64s, generator: np.random.Generator
    ) -> tuple[Int64s, Int64s]:
        """The key of each prompt in its family, and its LCP with the pivot.

        Args:
            idxs: [n] int64, prompts.
            generator: draws the pivots.
        """
        firsts = np.flatnonzero(np.diff(self.numbers, prepend=-1))
        sizes = np.diff(np.append(firsts, len(idxs)))
        pivots = firsts + generator.integers(0, sizes)
        pivot_of = np.repeat(pivots, sizes)
        keys = np.full(len(idxs), _PIVOT << _TOKEN_BITS, dtype=np.int64)
        common = self.depths.copy()
        common[pivots] = prompts.lengths[idxs[pivots]]
        equal = np.flatnonzero(pivot_of != np.arange(len(idxs)))
        num_read, window = 0, _FIRST_WINDOW
        while len(equal):
            parts = [equal[part] for part in chunks(np.full(len(equal), window))]
            read = [np.concatenate([np.unique(pivot_of[part]), part]) for part in parts]
            wanted = ((idxs[some], self.depths[some] + num_read, window) for some in read)
            still = []
            for part, some, tokens in zip(parts, read, read_ahead(prompts, wanted), strict=True):
                rows = np.searchsorted(some[: len(some) - len(part)], pivot_of[part])
                begins = self.depths[part] + num_read
                num_same = np.empty(len(part), dtype=np.int64)
                parted = np.empty(len(part), dtype=np.int64)
                _part(tokens.token_ids, tokens.offsets, rows, begins, num_same, parted)
                common[part], keys[part] = begins + num_same, parted
                still.append(part[num_same == window])
            equal = np.concatenate(still)
            num_read, window = num_read + window, min(window * _WIDER, CHUNK_TOKENS)
        return keys, common


@compiled
def _part(
    token_ids: Int32s,
    offsets: Int64s,
    pivots: Int64s,
    begins: Int64s,
    num_same: Int64s,
    keys: Int64s,
) -> None:
    """Compares windows with those of their pivots, the first rows; fills the last two arrays."""
    first = len(offsets) - 1 - len(pivots)
    for item in range(len(pivots)):
        pivot = token_ids[offsets[pivots[item]] : offsets[pivots[item] + 1]]
        prompt = token_ids[offsets[first + item] : offsets[first + item + 1]]
        most = min(len(pivot), len(prompt))
        same = num_equal(pivot[:most], prompt[:most])
        mine = np.int64(prompt[same]) + 1 if same < len(prompt) else 0  # 0: it ends here
        theirs = np.int64(pivot[same]) + 1 if same < len(pivot) else 0
        place = _PIVOT
        if mine < theirs:
            place = begins[item] + same
        elif mine > theirs:
            place = 2 * _PIVOT - 1 - (begins[item] + same)
        num_same[item] = same
        keys[item] = (place << _TOKEN_BITS) | mine


@compiled
def num_equal(left: Int32s, right: Int32s) -> int:
    """Length of the common prefix of two arrays of equal length."""
    count = 0
    while count + _COMPARE_STRIDE <= len(left):
        differing = np.int32(0)
        left_chunk = left[count : count + _COMPARE_STRIDE]
        right_chunk = right[count : count + _COMPARE_STRIDE]
        for position in range(_COMPARE_STRIDE):
            differing |= left_chunk[position] ^ right_chunk[position]
        if differing != 0:
            break
        count += _COMPARE_STRIDE
    while count < len(left) and left[count] == right[count]:
        count += 1
    return count
