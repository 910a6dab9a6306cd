"""Shards: nothing lost, balanced as longest-processing-time-first promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.planner import assign_shards, imbalance

COSTS = st.lists(st.integers(0, 1000), max_size=40).map(lambda c: np.array(c, dtype=np.float64))


def greedy(costs: np.ndarray, num_shards: int) -> list[int]:
    loads = [0.0] * num_shards
    assignment = [0] * len(costs)
    for idx in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        shard = min(range(num_shards), key=lambda s: (loads[s], s))
        assignment[idx] = shard
        loads[shard] += costs[idx]
    return assignment


@settings(deadline=None)
@given(COSTS, st.integers(1, 9))
def test_dearest_group_goes_to_the_cheapest_shard(costs: np.ndarray, num_shards: int) -> None:
    assignment = assign_shards(costs, num_shards)
    assert assignment.dtype == np.int64
    assert assignment.tolist() == greedy(costs, num_shards)


@settings(deadline=None)
@given(COSTS.filter(lambda c: c.sum() > 0), st.integers(1, 9))
def test_imbalance_is_within_one_group_of_even(costs: np.ndarray, num_shards: int) -> None:
    found = imbalance(costs, assign_shards(costs, num_shards), num_shards)
    mean = costs.sum() / num_shards
    assert found >= 1.0 - 1e-9
    assert found <= (mean + costs.max()) / mean + 1e-9


def test_imbalance_is_max_over_mean() -> None:
    costs = np.array([6.0, 2.0, 1.0])
    assert imbalance(costs, np.array([0, 1, 1]), 2) == pytest.approx(6 / 4.5)
    assert imbalance(costs, np.array([0, 1, 1]), 3) == pytest.approx(6 / 3)


def test_no_work_is_balanced() -> None:
    assert imbalance(np.zeros(3), np.zeros(3, dtype=np.int64), 4) == 1.0
    none = np.zeros(0)
    assert assign_shards(none, 3).tolist() == []
    assert imbalance(none, assign_shards(none, 3), 3) == 1.0


def test_bad_input_is_refused() -> None:
    one = np.ones(1)
    with pytest.raises(PlanError):
        assign_shards(one, 0)
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(PlanError, match="group 1 "):
            assign_shards(np.array([1.0, bad]), 2)
    with pytest.raises(PlanError):
        imbalance(one, np.array([2]), 2)
    with pytest.raises(PlanError):
        imbalance(one, np.array([0, 0]), 2)
