"""Splits a prefix into a chunk for each replica of a chain (ADR 23).

Later tokens attend to more, so later chunks are shorter (Cho et al., Sec. 4.2). Two ways:

    closed form   chunks that take equally long to compute: near the best for long chunks
    table         splits searched for some lengths, interpolated between (the paper's KVR-P)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.runahead.prediction import Chain, Split

_LEAST_BLOCKS: Final = 16
_LEAST_LAYERS: Final = 12
_LEAST_MATRICES: Final = 3.0
_MOST_SEARCHED: Final = 8
"""Most lengths of a table."""


def split_prefixes(chain: Chain, lengths: Iterable[int]) -> dict[int, Split]:
    """The split of each prefix, by its length in tokens, which `Chain.can_split`."""
    ordered = sorted(set(lengths))
    splits = {length: closed_form(chain, length) for length in ordered}
    if searched := [length for length in ordered if not is_closed_form_near(chain, length)]:
        places = np.linspace(0, len(searched) - 1, min(_MOST_SEARCHED, len(searched)))
        table = SplitTable.search(chain, [searched[round(place)] for place in places])
        splits |= {length: table.split(length) for length in searched}
    return splits


def is_closed_form_near(chain: Chain, num_tokens: int) -> bool:
    """Whether the closed form is within 1 % of the best split (`benchmarks.runahead_rules`).

    It takes chunks of 16 blocks in the mean, whose matrices take three times what reading the
    weights takes, and 12 layers; otherwise whole blocks, the weights, and the wait for the first
    layer's transfers decide where the best split is.
    """
    mean_chunk = num_tokens / chain.num_replicas
    return (
        mean_chunk >= _LEAST_BLOCKS * chain.block_size
        and mean_chunk * chain.cost.s_per_token >= _LEAST_MATRICES * chain.cost.weights_s
        and chain.cost.num_layers >= _LEAST_LAYERS
    )


def even_split(chain: Chain, num_tokens: int) -> Split:
    """Chunks of equal numbers of blocks (the paper's KVR-E)."""
    return chain.split_at(lambda begin, left: begin + (num_tokens - begin) / left, num_tokens)


def closed_form(chain: Chain, num_tokens: int) -> Split:
    """Chunks that take equally long to compute, if no replica waits for another.

    The tokens up to e take W(e) = a * e + b / 2 * e^2 in a layer, so each chunk ends where W has
    grown by its share of what is left.
    """
    b = chain.cost.s_per_pair
    a = chain.cost.s_per_token + b / 2

    def end_after(begin: int, left: int) -> float:
        work, whole = (a * end + b / 2 * end**2 for end in (begin, num_tokens))
        work += (whole - work) / left
        return 2 * work / (a + math.sqrt(a**2 + 2 * b * work))

    return chain.split_at(end_after, num_tokens)


def search_split(chain: Chain, num_tokens: int) -> Split:
    """A split that no move of blocks improves, by a pattern search (the paper's KVR-S).

    Starts with the closed form and with even chunks. Strides halve down to one block.
    """
    moves = _moves(chain.num_replicas) * chain.block_size
    longest_stride = 1 << max(num_tokens // chain.block_size // 4, 1).bit_length() - 1
    ends: list[tuple[float, Split]] = []
    for start in (closed_form(chain, num_tokens), even_split(chain, num_tokens)):
        best, stride = np.array(start), longest_stride
        least = float(chain.seconds(best[np.newaxis])[0])
        while stride:
            near = best + stride * moves
            seconds = chain.seconds(near)
            if seconds.min() < least:
                best, least = near[np.argmin(seconds)], float(seconds.min())
            else:
                stride //= 2
        ends.append((least, tuple(best.tolist())))
    return min(ends)[1]


def _moves(num_replicas: int) -> NDArray[np.int64]:
    """Blocks that each chunk gains, [num_moves, p]: one from another, or from all others."""
    one = np.eye(num_replicas, dtype=np.int64)
    moves = [one[grows] - one[shrinks] for grows, shrinks in permutations(range(num_replicas), 2)]
    moves += [sign * (num_replicas * chunk - 1) for chunk in one for sign in (1, -1)]
    return np.array(moves)


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """Splits of some lengths; those between are interpolated, as shares of the prefix (Sec. 4.2).

    Shorter and longer prefixes have the shares of the shortest and the longest one.
    """

    chain: Chain
    lengths: NDArray[np.int64]
    """[num], ascending."""
    shares: NDArray[np.float64]
    """[num, p - 1], where chunks but the last end."""

    @classmethod
    def search(cls, chain: Chain, lengths: Iterable[int]) -> SplitTable:
        """Search a split for each length, in tokens; at least one."""
        ordered = np.array(sorted(set(lengths)), dtype=np.int64)
        splits = np.array([search_split(chain, length) for length in ordered.tolist()])
        ends = np.cumsum(splits, axis=1)[:, :-1]
        return cls(chain, ordered, ends / ordered[:, np.newaxis])

    def split(self, num_tokens: int) -> Split:
        """The split of a prefix that `Chain.can_split`."""
        shares = [np.interp(num_tokens, self.lengths, column) for column in self.shares.T]
        return self.chain.split_at(lambda _, left: num_tokens * shares[-left + 1], num_tokens)
