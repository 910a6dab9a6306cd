"""Splits a chain's prefix into chunks: equal ones, or the best of a search.

The first chunks should be short, so that later replicas don't wait for them, and so should the
last ones, whose tokens attend to the most (Cho et al., Sec. 4.2). With slow hops the balance
changes, and there may be several local optima.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from functools import cache, partial
from itertools import combinations, pairwise, permutations, product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning.chain import Chain, Goal, Split

_COARSE_SPLITS: Final = 4096
"""Most splits of the first, coarse grid."""
_NUM_KEPT: Final = 16
"""Best splits of the coarse grid that are refined, each by itself."""
_MOST_MOVED_TOGETHER: Final = 8
"""Most replicas for which any chunks may grow and shrink together in a move."""
_BISECTIONS: Final = 30


def even_split(num_tokens: int, num_replicas: int, block_size: int = 16) -> Split:
    """Chunks of equal numbers of blocks (KVR-E).

    Raises:
        PlanError: the prefix has fewer blocks than there are replicas.
    """
    num_blocks = -(-num_tokens // block_size)
    if num_replicas < 1 or num_blocks < num_replicas:
        raise PlanError(
            f"chain: a prefix of {num_tokens} tokens has fewer blocks of {block_size} than there"
            f" are replicas, {num_replicas}"
        )
    ends = [num_blocks * idx // num_replicas for idx in range(num_replicas + 1)]
    return split_at(ends[1:-1], num_tokens, block_size)


def split_at(ends: list[int], num_tokens: int, block_size: int) -> Split:
    """The split whose chunks, except the last, end after `ends` blocks, ascending."""
    bounds = [0, *(end * block_size for end in ends), num_tokens]
    return tuple(int(end) - int(start) for start, end in pairwise(bounds))


def search_split(
    chain: Chain, num_tokens: int, num_replicas: int, until: Goal = "first_token"
) -> Split:
    """Chunks with the shortest predicted time, by a hierarchical grid search (KVR-S).

    As in the paper (Sec. 4.2, Fig. 6), a grid of boundaries is searched, then a finer one around
    the best, down to single blocks. In addition, the first grid covers all splits; several of its
    best are refined, because slow hops make local optima, and so are equal chunks and chunks of
    equal time; and a grid moves as long as its best is at another place. Takes some 10^3 to 10^6
    evaluations of the model, for any length.

    Args:
        num_tokens: tokens of the prefix.
        num_replicas: p; each gets a chunk.
        until: the time to minimize.

    Raises:
        PlanError: as `Chain.check_length`.
    """
    chain.check_length(num_tokens, num_replicas)
    num_blocks = -(-num_tokens // chain.block_size)
    even = [[num_blocks * idx // num_replicas for idx in range(1, num_replicas)]]
    if num_replicas == 1:
        return (num_tokens,)
    grid = _Grid(chain, num_tokens, num_replicas, until)
    stride = _coarse_stride(num_blocks, num_replicas)
    coarse = np.array(
        [*combinations(range(stride, num_blocks, stride), num_replicas - 1), *even], dtype=np.int64
    )
    seconds = grid.seconds(coarse)
    kept = coarse[np.argsort(seconds, kind="stable")[:_NUM_KEPT]]
    balanced = np.array(_balanced_ends(chain, num_blocks, num_replicas), dtype=np.int64)
    starts = (*kept, np.array(even[0], dtype=np.int64), balanced)
    found = [grid.refine(ends, stride) for ends in starts]
    _, best = min(found, key=lambda each: (each[0], each[1]))
    return split_at(best, num_tokens, chain.block_size)


class _Grid:
    """Splits of one prefix, as the blocks after which their chunks end."""

    def __init__(self, chain: Chain, num_tokens: int, num_replicas: int, until: Goal) -> None:
        self._chain, self._num_tokens, self._until = chain, num_tokens, until
        self._moves = _moves(num_replicas)

    def seconds(self, ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of each row of ends, [num, p - 1], in blocks; inf if it isn't a split."""
        bounds = np.zeros((len(ends), ends.shape[1] + 2), dtype=np.int64)
        bounds[:, 1:-1], bounds[:, -1] = ends * self._chain.block_size, self._num_tokens
        return self._chain.seconds(np.diff(bounds, axis=1), self._until)

    def refine(self, ends: NDArray[np.int64], stride: int) -> tuple[float, list[int]]:
        """The best seconds from `ends` with decreasing strides, and its ends."""
        has_improved = False
        best, start = float(self.seconds(ends[np.newaxis])[0]), stride
        while stride:
            near = ends + stride * self._moves
            seconds = self.seconds(near)
            idx = int(np.argmin(seconds))
            if seconds[idx] < best:
                best, ends = float(seconds[idx]), near[idx]
                has_improved = True
            else:
                stride //= 2
            if not stride and has_improved:
                stride, has_improved = start, False
        return best, ends.tolist()


def _balanced_ends(chain: Chain, num_blocks: int, num_replicas: int) -> list[int]:
    """Ends, in blocks, of chunks that take equally long to compute, without transfers."""
    most = chain.max_chunk_blocks or num_blocks
    size = chain.block_size

    def block_seconds(before: int, num: int) -> float:
        return chain.cost.chunk_seconds(num * size, before * size)

    def ends_within(seconds: float) -> list[int]:
        """Ends of the longest chunks that each take at most `seconds`."""
        ends = [0]
        for left in range(num_replicas - 1, 0, -1):
            before = ends[-1]
            least = max(1, num_blocks - before - left * most)  # so that the rest fits
            longest = min(most, num_blocks - before - left)
            chunks = range(least, longest + 1)
            taken = partial(block_seconds, before)
            fit = bisect.bisect_right(chunks, seconds, key=taken)
            ends.append(before + chunks[max(fit, 1) - 1])
        return ends[1:]

    low, high = 0.0, block_seconds(0, num_blocks)
    for _ in range(_BISECTIONS):
        seconds = (low + high) / 2
        last = ends_within(seconds)[-1]
        if block_seconds(last, num_blocks - last) > seconds:
            low = seconds
        else:
            high = seconds
    return ends_within(high)


def _coarse_stride(num_blocks: int, num_replicas: int) -> int:
    """The smallest power of two with at most `_COARSE_SPLITS` splits on its grid."""
    stride = 1
    while math.comb((num_blocks - 1) // stride, num_replicas - 1) > _COARSE_SPLITS:
        stride *= 2
    return stride


@cache
def _moves(num_replicas: int) -> NDArray[np.int64]:
    """Moves of the ends, [num_moves, p - 1]: some chunks shrink and others grow by as much.

    Where a search gets stuck, several replicas are the slowest, so chunks move together: of up to
    8, any set against any other; of more, one against one, or the first ones against the others.
    """
    everyone = range(num_replicas)
    signs: Iterable[tuple[int, ...]] = product((-1, 0, 1), repeat=num_replicas)
    if num_replicas > _MOST_MOVED_TOGETHER:
        signs = [
            tuple((idx == grows) - (idx == shrinks) for idx in everyone)
            for grows, shrinks in permutations(everyone, 2)
        ]
        for side, num_first in product((-1, 1), everyone[1:]):
            signs.append(tuple(side if idx < num_first else -side for idx in everyone))
    moves = []
    for sign in signs:
        change = np.array(sign, dtype=np.int64)
        grow, shrink = np.flatnonzero(change > 0), np.flatnonzero(change < 0)
        few, many = sorted((grow, shrink), key=len)
        if len(few):
            share, rest = divmod(len(many), len(few))
            change[few] *= share + (np.arange(len(few)) < rest)
            moves.append(np.cumsum(change)[:-1])
    found = np.array(moves)
    found.flags.writeable = False  # it is cached
    return found
