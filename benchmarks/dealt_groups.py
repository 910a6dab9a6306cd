"""How shards were dealt before: groups, costliest first, each to the cheapest shard so far."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.prefixes import PrefixGroups

_STEPS = 40


def deal_out(
    groups: PrefixGroups,
    member_costs: NDArray[np.float64],
    prefix_costs: NDArray[np.float64],
    num_shards: int,
) -> NDArray[np.int64]:
    """The shard of each prompt, by longest processing time first.

    A group above its fair share is cut into parts that each compute the prefix: the fewest within
    the smallest limit that is a fair share of the work after the cuts.

    Args:
        member_costs: [num_prompts] float64, of each prompt without its group's prefix.
        prefix_costs: [num_groups] float64.
    """
    parts = [
        (cost, groups.members(idx)[begin:end])
        for idx, cuts in enumerate(_cut_groups(groups, member_costs, prefix_costs, num_shards))
        for begin, end, cost in cuts
    ]
    loads = [(0.0, shard) for shard in range(num_shards)]
    heapify(loads)
    shard_of_prompt = np.empty(groups.num_prompts, dtype=np.int64)
    for cost, members in sorted(parts, key=lambda part: -part[0]):
        load, shard = loads[0]
        shard_of_prompt[members] = shard
        heapreplace(loads, (load + cost, shard))
    return shard_of_prompt


Cuts = list[tuple[int, int, float]]
"""Begin, end and cost of a group's parts."""


def _cut_groups(
    groups: PrefixGroups,
    member_costs: NDArray[np.float64],
    prefix_costs: NDArray[np.float64],
    num_shards: int,
) -> list[Cuts]:
    costs = member_costs[groups.member_idxs]
    totals = np.add.reduceat(costs, groups.offsets[:-1]) + prefix_costs
    fair = float(totals.sum()) / num_shards
    cuts: list[Cuts] = [
        [(0, size, total)]
        for size, total in zip(groups.sizes.tolist(), totals.tolist(), strict=True)
    ]
    large = [idx for idx in np.flatnonzero(totals > fair).tolist() if groups.sizes[idx] > 1]
    if not large or num_shards == 1:
        return cuts

    def cut_all(limit: float) -> float:
        """Cuts the large groups; the fair share that follows."""
        added = 0.0
        for idx in large:
            members = costs[groups.offsets[idx] : groups.offsets[idx + 1]]
            cuts[idx] = _cut(members.tolist(), float(prefix_costs[idx]), limit)
            added += (len(cuts[idx]) - 1) * float(prefix_costs[idx])
        return fair + added / num_shards

    unfair, limit = fair, float(totals[large].max())
    for _ in range(_STEPS):
        tried = (unfair + limit) / 2
        unfair, limit = (tried, limit) if cut_all(tried) > tried else (unfair, tried)
    cut_all(limit)
    return cuts


def _cut(members: list[float], prefix: float, limit: float) -> Cuts:
    """The fewest parts within the limit."""
    cuts: Cuts = []
    begin, cost = 0, prefix + members[0]
    for position in range(1, len(members)):
        if cost + members[position] > limit:
            cuts.append((begin, position, cost))
            begin, cost = position, prefix
        cost += members[position]
    return [*cuts, (begin, len(members), cost)]
