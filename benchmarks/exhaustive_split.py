"""The best of all splits of a prefix, which the search is checked against."""

from __future__ import annotations

import math
from itertools import combinations, islice
from typing import Final

import numpy as np

from batchllm_operator.errors import PlanError
from batchllm_operator.runahead.planning import Chain, Goal, Split
from batchllm_operator.runahead.planning.search import split_at

_BATCH: Final = 65_536
_MOST: Final = 20_000_000


def exhaustive_split(
    chain: Chain, num_tokens: int, num_replicas: int, until: Goal = "first_token"
) -> Split:
    """The split of all with the least predicted time.

    Raises:
        PlanError: as `Chain.check_length`, or there are more than 20 million splits.
    """
    chain.check_length(num_tokens, num_replicas)
    num_blocks = -(-num_tokens // chain.block_size)
    count = math.comb(num_blocks - 1, num_replicas - 1)
    if count > _MOST:
        raise PlanError(f"chain: {count:,} splits are too many to try all")
    best: tuple[float, list[int]] = (math.inf, [])
    splits = combinations(range(1, num_blocks), num_replicas - 1)
    while some := list(islice(splits, _BATCH)):
        ends = np.array(some, dtype=np.int64).reshape(len(some), num_replicas - 1)
        bounds = np.zeros((len(ends), num_replicas + 1), dtype=np.int64)
        bounds[:, 1:-1], bounds[:, -1] = ends * chain.block_size, num_tokens
        seconds = chain.seconds(np.diff(bounds, axis=1), until)
        idx = int(np.argmin(seconds))
        best = min(best, (float(seconds[idx]), ends[idx].tolist()))
    return split_at(best[1], num_tokens, chain.block_size)
