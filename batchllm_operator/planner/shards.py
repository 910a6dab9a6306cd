"""Assigns groups to shards, so that all finish at about the same time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.algorithm1 import PrefixGroups
from batchllm_operator.planner.jit import compiled

_LIMIT_STEPS = 40  # bisection steps for the limit of a part
_ROUNDING = 1e-9  # upper bound of the rounding error of sums of costs


def assign_shards(group_costs: NDArray[np.float64], num_shards: int) -> NDArray[np.int64]:
    """Longest processing time first: each group, costliest first, to the cheapest shard so far.

    Groups stay whole; `split_large_groups` cuts those above a fair share. Equal costs are taken in
    the given order, and equally cheap shards by index, so the result is deterministic. Groups keep
    their order inside a shard: shard `s` has the groups `np.flatnonzero(assignment == s)`. With
    more shards than groups, some stay empty.

    Args:
        group_costs: [num_groups] float64, finite, >= 0, in any one unit.
        num_shards: at least 1.

    Returns:
        [num_groups] int64, the shard of each group, in [0, num_shards).

    Raises:
        PlanError: there is no shard, or a cost is negative or not finite.
    """
    _check_shards(group_costs, num_shards)
    costliest_first = np.argsort(-group_costs, kind="stable")
    return _assign(np.asarray(group_costs, dtype=np.float64), costliest_first, num_shards)


def imbalance(
    group_costs: NDArray[np.float64], assignment: NDArray[np.int64], num_shards: int
) -> float:
    """Cost of the costliest shard / mean cost of all `num_shards`, empty ones included.

    It is 1.0 if all cost the same or nothing.

    Args:
        group_costs: [num_groups] float64, finite, >= 0.
        assignment: [num_groups] int64 in [0, num_shards).
        num_shards: at least 1.

    Raises:
        PlanError: as `assign_shards`, or the assignment doesn't fit.
    """
    _check_shards(group_costs, num_shards)
    if assignment.shape != group_costs.shape:
        raise PlanError(f"{len(group_costs)} groups, but {len(assignment)} shard assignments")
    if len(assignment) and not (assignment.min() >= 0 and assignment.max() < num_shards):
        raise PlanError(f"shard assignments must lie in [0, {num_shards})")
    shard_costs = np.bincount(assignment, weights=group_costs, minlength=num_shards)
    mean = float(shard_costs.mean())
    return float(shard_costs.max()) / mean if mean > 0 else 1.0


def split_large_groups(
    groups: PrefixGroups,
    member_costs: NDArray[np.float64],
    prefix_costs: NDArray[np.float64],
    num_shards: int,
) -> PrefixGroups:
    """Cuts each group that alone exceeds a fair share of the work, so that shards can be even.

    Each part computes the prefix again, so a cut adds work for every shard. The limit of parts is
    therefore the smallest share that is fair *after* the cuts: at least (total cost + repeated
    prefixes) / num_shards. It grows with the repeated prefixes, so a group that is nearly all
    prefix stays in few parts or whole instead of adding more work than the cut saves.

    A group within the limit stays whole; others are cut into the fewest parts of adjacent members
    within it. A single member may exceed the limit; it becomes a group of one, without a prefix,
    at the unchanged cost of member and prefix. The time is linear in the number of prompts, and the
    result is independent of their order as long as sums of costs are exact.

    Args:
        groups: groups over prompts [0, num_prompts).
        member_costs: [num_prompts] float64, finite, >= 0, cost of each prompt without its group's
            prefix, in any one unit (such as tokens).
        prefix_costs: [num_groups] float64, finite, >= 0, cost of each group's prefix.
        num_shards: at least 1; 1 changes nothing.

    Returns:
        Groups with the members in unchanged order, the parts of a group adjacent.

    Raises:
        PlanError: no shard, a cost that is negative or not finite, or costs don't fit the groups.
    """
    _check_shards(prefix_costs, num_shards)
    costs = _costs_in_group_order(groups, member_costs)
    if len(prefix_costs) != len(groups):
        raise PlanError(f"{len(groups)} groups, but {len(prefix_costs)} prefix costs")
    if num_shards == 1 or len(groups) == 0:
        return groups
    prefix_costs = np.asarray(prefix_costs, dtype=np.float64)
    group_costs = np.add.reduceat(costs, groups.offsets[:-1]) + prefix_costs
    fair_share = float(group_costs.sum()) / num_shards
    large = np.flatnonzero((group_costs > fair_share) & (groups.sizes > 1))
    if len(large) == 0:
        return groups
    begins_part = np.zeros(groups.num_prompts, dtype=np.bool_)
    begins_part[groups.offsets[:-1]] = True

    def added_share(limit: float) -> float:
        added = _cut_groups(costs, groups.offsets, prefix_costs, large, limit, begins_part)
        return added / num_shards

    most = float(group_costs[large].max()) * (1 + _ROUNDING)
    added_share(_fair_limit(fair_share, most, added_share))
    return _groups_of_parts(groups, begins_part)


def _fair_limit(fair_share: float, most: float, added_share: Callable[[float], float]) -> float:
    """The smallest limit of parts, at most `most`, that is a fair share after its cuts."""
    unfair, limit, tried = fair_share, most, fair_share
    for _ in range(_LIMIT_STEPS):
        if fair_share + added_share(tried) > tried:
            unfair = tried
        else:
            limit = tried
        tried = (unfair + limit) / 2
    return limit


def _costs_in_group_order(
    groups: PrefixGroups, member_costs: NDArray[np.float64]
) -> NDArray[np.float64]:
    idxs = groups.member_idxs
    if len(idxs) and not (idxs.min() >= 0 and idxs.max() < len(member_costs)):
        raise PlanError(f"groups refer to prompts outside [0, {len(member_costs)})")
    costs = np.asarray(member_costs, dtype=np.float64)[idxs]
    wrong = ~(np.isfinite(costs) & (costs >= 0))
    if np.any(wrong):
        position = int(np.argmax(wrong))
        raise PlanError(f"prompt {idxs[position]} has the cost {costs[position]}")
    return costs


def _groups_of_parts(groups: PrefixGroups, begins_part: NDArray[np.bool_]) -> PrefixGroups:
    offsets = np.append(np.flatnonzero(begins_part), groups.num_prompts).astype(np.int64)
    parts_per_group = np.add.reduceat(begins_part, groups.offsets[:-1], dtype=np.int64)
    prefix = np.repeat(groups.num_prefix_tokens, parts_per_group)
    prefix[np.diff(offsets) == 1] = 0
    return PrefixGroups(groups.member_idxs, offsets, prefix)


def _check_shards(group_costs: NDArray[np.float64], num_shards: int) -> None:
    if num_shards < 1:
        raise PlanError(f"a plan needs at least one shard, not {num_shards}")
    wrong = ~(np.isfinite(group_costs) & (group_costs >= 0))
    if np.any(wrong):
        group_idx = int(np.argmax(wrong))
        raise PlanError(f"group {group_idx} has the cost {group_costs[group_idx]}")


@compiled
def _assign(
    costs: NDArray[np.float64], costliest_first: NDArray[np.int64], num_shards: int
) -> NDArray[np.int64]:
    loads = np.zeros(num_shards, dtype=np.float64)
    assignment = np.empty(len(costs), dtype=np.int64)
    for group_idx in costliest_first:
        shard = np.argmin(loads)
        assignment[group_idx] = shard
        loads[shard] += costs[group_idx]
    return assignment


@compiled
def _cut_groups(
    costs: NDArray[np.float64],
    offsets: NDArray[np.int64],
    prefix_costs: NDArray[np.float64],
    large: NDArray[np.int64],
    limit: float,
    begins_part: NDArray[np.bool_],
) -> float:
    """Marks where the parts of the groups `large` begin; returns the cost of repeated prefixes.

    Each part takes members up to the limit, which gives the fewest parts.

    Args:
        costs: [num_prompts], the members' costs, group after group.
        begins_part: [num_prompts], written for the members of `large` only.
    """
    repeated = 0.0
    for group_idx in large:
        part_cost = prefix_costs[group_idx] + costs[offsets[group_idx]]
        for position in range(offsets[group_idx] + 1, offsets[group_idx + 1]):
            begins_part[position] = part_cost + costs[position] > limit
            if begins_part[position]:
                part_cost = prefix_costs[group_idx]
                repeated += prefix_costs[group_idx]
            part_cost += costs[position]
    return repeated
