"""Groups onto GPU workers, so that all of them finish at about the same time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.errors import PlanError
from batchllm_operator.planner.jit import compiled


def assign_shards(group_costs: NDArray[np.float64], num_shards: int) -> NDArray[np.int64]:
    """Longest processing time first: each group, dearest first, to the cheapest shard so far.

    Groups are never split, so one group may outweigh a fair share. Equal costs are taken in
    the order given, and equally cheap shards by index, so the same costs always give the
    same shards. Groups inside a shard keep their order: shard `s` has the groups
    `np.flatnonzero(assignment == s)`. Shards stay empty if there are more of them than groups.

    Args:
        group_costs: [num_groups] float64, finite, >= 0, in any one unit.
        num_shards: at least 1.

    Returns:
        [num_groups] int64, the shard of each group, in [0, num_shards).

    Raises:
        PlanError: there is no shard, or a cost is negative or not finite.
    """
    _check_shards(group_costs, num_shards)
    dearest_first = np.argsort(-group_costs, kind="stable")
    return _assign(np.asarray(group_costs, dtype=np.float64), dearest_first, num_shards)


def imbalance(
    group_costs: NDArray[np.float64], assignment: NDArray[np.int64], num_shards: int
) -> float:
    """Cost of the dearest shard / mean cost of a shard: 1.0 is perfect, and no work is too.

    It is by what factor the slowest worker exceeds a job that is spread evenly over all
    `num_shards` shards, the empty ones included.

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


def _check_shards(group_costs: NDArray[np.float64], num_shards: int) -> None:
    if num_shards < 1:
        raise PlanError(f"a plan needs at least one shard, not {num_shards}")
    wrong = ~(np.isfinite(group_costs) & (group_costs >= 0))
    if np.any(wrong):
        group_idx = int(np.argmax(wrong))
        raise PlanError(f"group {group_idx} has the cost {group_costs[group_idx]}")


@compiled
def _assign(
    costs: NDArray[np.float64], dearest_first: NDArray[np.int64], num_shards: int
) -> NDArray[np.int64]:
    loads = np.zeros(num_shards, dtype=np.float64)
    assignment = np.empty(len(costs), dtype=np.int64)
    for group_idx in dearest_first:
        shard = np.argmin(loads)
        assignment[group_idx] = shard
        loads[shard] += costs[group_idx]
    return assignment
