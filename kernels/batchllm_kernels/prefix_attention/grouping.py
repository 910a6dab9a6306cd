"""Finds the requests of a batch that share a prefix, if sharing pays.

In plain Python, for the reference; `device/grouping.py` does the same on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from batchllm_kernels.prefix_attention.batch import PagedBatch, SharedPrefix

MAX_GATED_DEGREE = 64
"""Larger degrees count as this one."""
NEVER = 2**30
"""A prefix length that no group reaches."""


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class Gate:
    """Decides when reading a group's prefix once pays, by measurements of the architecture.

    Reading it separately costs a second tile and a merge; for short prefixes a cache is as good.
    """

    min_prefix_tokens: Mapping[Annotated[int, Field(ge=2)], PositiveInt]
    """Least prefix by degree: the entry of the largest degree up to the group's counts."""
    max_member_tokens: PositiveInt
    """Most query tokens of a member: longer chunks fill tiles on their own."""

    def min_prefix_by_degree(self) -> list[int]:
        """Least prefix in tokens for the degrees 0 to `MAX_GATED_DEGREE`."""
        least, table = NEVER, []
        for degree in range(MAX_GATED_DEGREE + 1):
            least = self.min_prefix_tokens.get(degree, least)
            table.append(least)
        return table


def find_shared_prefixes(
    batch: PagedBatch, block_size: int, gate: Gate, tile_tokens: int | None = None
) -> list[SharedPrefix]:
    """Groups of requests by equal block-table rows: single-level, each request in at most one.

    Each request asks for the depth, open by the gate, that saves most block reads: p * (1 - 1/c)
    for p blocks that c requests have in common. Requests that ask for the same block at the same
    depth are a group. All members have the same number of query tokens. Only whole blocks of
    context from before this step count, so every query sees all of its group's prefix.

    Args:
        batch: read on the host, which waits for a batch on a GPU.
        block_size: tokens in a block of the KV cache.
        gate: groups that it closes are left out. Others are sorted by their first member.
        tile_tokens: query tokens that the kernel stacks in a tile: a prefix is read once for that
            many, and the gate doesn't count larger degrees. None without a limit.
    """
    table = batch.block_table.cpu().numpy()
    query_lens = np.diff(batch.query_start_loc.cpu().numpy())
    context_lens = batch.seq_lens.cpu().numpy() - query_lens
    eligible = (query_lens > 0) & (query_lens <= gate.max_member_tokens)
    num_blocks = np.where(eligible, context_lens // block_size, 0)
    least = np.array(gate.min_prefix_by_degree())

    def passes(depths: NDArray[np.int64], degrees: Any, query_len: int) -> Any:
        per_tile = tile_tokens // query_len if tile_tokens else MAX_GATED_DEGREE
        return depths * block_size >= least[np.minimum(degrees, min(per_tile, MAX_GATED_DEGREE))]

    by_block: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for request in np.flatnonzero(num_blocks):
        query_len = int(query_lens[request])
        alike = np.where(query_lens == query_len, num_blocks, 0)
        equal = table[:, : alike[request]] == table[request, : alike[request]]
        common = np.where(equal.all(axis=1), alike[request], equal.argmin(axis=1))
        common = np.sort(np.delete(np.minimum(common, alike), request))[::-1]
        others = np.arange(1, len(common) + 1)
        share = others.astype(np.float32) / (others + 1).astype(np.float32)
        is_open = passes(common, others + 1, query_len)
        savings = np.where(is_open, common.astype(np.float32) * share, 0)
        if len(common) and savings.max() > 0:
            depth = int(common[savings.argmax()])
            by_block[depth, int(table[request, depth - 1]), query_len].append(int(request))
    groups = []
    for (depth, _, query_len), asking in by_block.items():
        first = table[asking[0], :depth]
        members = tuple(one for one in asking if np.array_equal(table[one, :depth], first))
        if len(members) > 1 and passes(np.array(depth), len(members), query_len):
            groups.append(SharedPrefix(members, depth * block_size))
    return sorted(groups, key=lambda group: group.requests)
