"""Cuts sorted prompts into shards of about equal cost, where cuts cost least.

In lexicographic order a range of prompts is made of whole subtrees of the prefix tree, and each
prompt shares most with the one before it. So the cost of a shard of the prompts [a, b) is

    cut_costs[a] + costs[a] + ... + costs[b - 1]

where `costs` are those of prompts whose shared prefix is in the engine's cache, and `cut_costs`
those of that prefix, which the first prompt of a shard has to compute.

A shared prefix costs no more than the prompt before, whose part it is:
`cut_costs[r] <= cut_costs[r - 1] + costs[r - 1]`. So a range never costs more than one around it,
and moving a cut never makes both of its sides dearer. Therefore shards that are filled up one after
the other are the fewest within a limit, each shard can be cut further, and the least sum of cut
costs is convex in the number of shards (Aggarwal, Schieber, Tokuyama, *Finding a Minimum-Weight
k-Link Path in Graphs with the Concave Monge Property*, 1994).
"""

from typing import Final

import numpy as np

from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.jit import Float64s, Int64s, compiled

TOLERANCE: Final = 0.01
"""How much more than necessary the costliest shard may cost, so that cuts cost less."""
_STEPS: Final = 64  # of a bisection
_PRECISION: Final = 1e-9  # of the limit


def cut_into_shards(costs: Float64s, cut_costs: Float64s, num_shards: int) -> Int64s:
    """Bounds of the shards with the least sum of cut costs, among those of about equal cost.

    With B the least possible cost of the costliest shard, no shard costs more than
    (1 + `TOLERANCE`) * B. A prompt that alone costs more than that is a shard of its own, and
    doesn't count for B. Takes time in O(prompts) for each step of a bisection.

    Args:
        costs: [num_prompts] float64, finite, >= 0, in any one unit.
        cut_costs: [num_prompts] float64, finite, >= 0, in the same unit.
        num_shards: at least 1; with fewer prompts, each is a shard.

    Returns:
        [num + 1] int64 from 0 to num_prompts, rising, with num = min(num_shards, num_prompts).
    """
    assert num_shards >= 1 and costs.shape == cut_costs.shape
    assert np.all(np.isfinite(costs) & (costs >= 0) & np.isfinite(cut_costs) & (cut_costs >= 0))
    assert np.all(cut_costs[1:] <= cut_costs[:-1] + costs[:-1]), "a prefix is part of a prompt"
    num_shards = min(num_shards, len(costs))
    if num_shards in (0, 1, len(costs)):
        return np.linspace(0, len(costs), num_shards + 1).astype(np.int64)
    before = np.zeros(len(costs) + 1)
    np.cumsum(costs, out=before[1:])
    limit = _least_limit(before, cut_costs, num_shards) * (1 + TOLERANCE)
    # Each shard has a price. The right one makes the best cuts as many as are wanted.
    low, high = -float(cut_costs.max()) - 1.0, float(cut_costs.sum()) + 1.0
    few, many = (_cheapest(before, cut_costs, limit, price) for price in (high, low))
    for _ in range(_STEPS):
        if num_shards + 1 in (len(few), len(many)):
            break
        price = (low + high) / 2
        bounds = _cheapest(before, cut_costs, limit, price)
        if len(bounds) <= num_shards + 1:
            few, high = bounds, price
        else:
            many, low = bounds, price
    return _spliced(few, many, num_shards)


def split_groups(groups: PrefixGroups, shard_of_prompt: Int64s) -> tuple[PrefixGroups, Int64s]:
    """Groups within shards: the members that a group has in each shard are a group of their own.

    Args:
        groups: members are in lexicographic order, so those of a shard are neighbours.
        shard_of_prompt: [num_prompts] int64.

    Returns:
        The groups, parts of a group side by side, and the shard of each: [num_groups] int64. A part
        with one member has no prefix.
    """
    shards = shard_of_prompt[groups.member_idxs]
    begins = np.zeros(groups.num_prompts, dtype=np.bool_)
    begins[1:] = shards[1:] != shards[:-1]
    begins[groups.offsets[:-1]] = True
    firsts = np.flatnonzero(begins)
    offsets = np.append(firsts, groups.num_prompts)
    group_idxs = np.searchsorted(groups.offsets, firsts, side="right") - 1
    prefix = np.where(np.diff(offsets) > 1, groups.num_prefix_tokens[group_idxs], 0)
    return PrefixGroups(groups.member_idxs, offsets, prefix), shards[firsts]


def imbalance(shard_costs: Float64s) -> float:
    """Cost of the costliest shard / mean cost of all; 1.0 if nothing costs anything."""
    mean = float(shard_costs.mean()) if len(shard_costs) else 0.0
    return float(shard_costs.max()) / mean if mean > 0 else 1.0


def _least_limit(before: Float64s, cut_costs: Float64s, num_shards: int) -> float:
    """The least cost of the costliest shard, without shards of one prompt."""
    low, high = 0.0, float(before[-1] + cut_costs[0])
    for _ in range(_STEPS):
        tried = (low + high) / 2
        num, costliest = _filled_up(before, cut_costs, tried)
        if num > num_shards:
            low = tried
        else:
            high = costliest
        if high - low <= _PRECISION * high:
            break
    return high


@compiled
def _filled_up(before: Float64s, cut_costs: Float64s, limit: float) -> tuple[int, float]:
    """The fewest shards within a limit, and the cost of the costliest with several prompts."""
    begin, num, cost, costliest = 0, 1, 0.0, 0.0
    for end in range(2, len(before)):
        cost = cut_costs[begin] + (before[end] - before[begin])
        if cost > limit:
            begin = end - 1
            num += 1
        else:
            costliest = max(costliest, cost)
    return num, costliest


@compiled
def _cheapest(before: Float64s, cut_costs: Float64s, limit: float, price: float) -> Int64s:
    """Bounds of shards with the least sum of cut costs and of a price for each shard.

    A queue holds the begins that may still be the best, in order: a later one that isn't dearer
    makes those before it useless, as it allows what they allow.
    """
    num_prompts = len(cut_costs)
    least = np.empty(num_prompts + 1)  # of shards that end there; with the cut that follows
    begin_of = np.empty(num_prompts + 1, dtype=np.int64)
    queue = np.empty(num_prompts, dtype=np.int64)
    first, last = 0, -1
    least[0] = 0.0
    for end in range(1, num_prompts + 1):
        least[end - 1] += cut_costs[end - 1]
        while last >= first and least[queue[last]] > least[end - 1]:
            last -= 1
        last += 1
        queue[last] = end - 1
        while (
            first < last and cut_costs[queue[first]] + (before[end] - before[queue[first]]) > limit
        ):
            first += 1
        begin_of[end] = queue[first]
        least[end] = least[queue[first]] + price
    num_shards, end = 0, num_prompts
    while end > 0:
        num_shards, end = num_shards + 1, begin_of[end]
    bounds = np.empty(num_shards + 1, dtype=np.int64)
    bounds[num_shards] = num_prompts
    for shard in range(num_shards - 1, -1, -1):
        bounds[shard] = begin_of[bounds[shard + 1]]
    return bounds


def _spliced(few: Int64s, many: Int64s, num_shards: int) -> Int64s:
    """Bounds of `num_shards`, as cheap as both, from too few and too many at the same price.

    A shard of the few that has one of the many inside, so many shards later as are too many, is
    where the one goes over into the other: the begin of the first, the end of the second.
    """
    if len(few) == num_shards + 1:
        return few
    extra = len(many) - 1 - num_shards
    at = int(np.argmax(few[1:] >= many[extra + 1 : extra + len(few)]))
    return np.concatenate([few[: at + 1], many[extra + at + 1 :]])
