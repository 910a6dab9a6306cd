"""Shards: nothing lost, balanced as longest-processing-time-first promises."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.levels import examples

from batchllm_operator.errors import PlanError
from batchllm_operator.planner import (
    PrefixGroups,
    assign_shards,
    imbalance,
    split_large_groups,
)

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


# Groups that are too large for one shard


def make_groups(sizes: list[int], seed: int = 0) -> PrefixGroups:
    """Groups of the given sizes with prompts in any order; those that share have a prefix."""
    members = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return PrefixGroups(members, offsets, np.where(np.diff(offsets) > 1, 5, 0).astype(np.int64))


@st.composite
def costed_groups(draw: st.DrawFn) -> tuple[PrefixGroups, np.ndarray, np.ndarray]:
    sizes = draw(st.lists(st.integers(1, 4) | st.integers(5, 20), min_size=1, max_size=6))
    groups = make_groups(sizes, draw(st.integers(0, 99)))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    top = draw(st.sampled_from([1, 10, 300]))
    member_costs = generator.integers(0, top + 1, sum(sizes)).astype(np.float64)
    prefix_costs = generator.integers(0, draw(st.sampled_from([1, 30, 1000])), len(sizes))
    return groups, member_costs, np.where(groups.sizes > 1, prefix_costs, 0).astype(np.float64)


def greedy_parts(costs: list[float], prefix: float, limit: float) -> list[list[float]]:
    """The fewest runs of neighbours that cost at most `limit` each with their prefix."""
    parts = [[costs[0]]]
    for cost in costs[1:]:
        if prefix + sum(parts[-1]) + cost <= limit:
            parts[-1].append(cost)
        else:
            parts.append([cost])
    return parts


def smallest_fair_limit(large: list[tuple[list[float], float]], total: float, shards: int) -> float:
    """Parts change only at sums of neighbours; between two such sums the fair share is known."""
    sums = {total / shards, np.inf}
    for costs, prefix in large:
        for begin in range(len(costs)):
            sums |= {prefix + sum(costs[begin:end]) for end in range(begin + 1, len(costs) + 1)}
    steps = sorted(s for s in sums if s >= total / shards)
    for low, high in pairwise(steps):
        added = sum((len(greedy_parts(c, prefix, low)) - 1) * prefix for c, prefix in large)
        limit = max(low, (total + added) / shards)
        if limit < high:
            return limit
    raise AssertionError("the whole groups are within the last limit")


@settings(max_examples=examples(200))
@given(costed_groups(), st.integers(1, 9))
def test_large_groups_are_cut_into_the_fewest_fair_parts(
    case: tuple[PrefixGroups, np.ndarray, np.ndarray], num_shards: int
) -> None:
    groups, member_costs, prefix_costs = case
    listed = [
        (member_costs[groups.members(g)].tolist(), float(prefix_costs[g]))
        for g in range(len(groups))
    ]
    total = sum(sum(costs) + prefix for costs, prefix in listed)
    is_large = [sum(costs) + prefix > total / num_shards for costs, prefix in listed]
    large = [listed[g] for g in range(len(groups)) if is_large[g] and num_shards > 1]
    limit = smallest_fair_limit(large, total, num_shards)
    expected = []
    for g, (costs, prefix) in enumerate(listed):
        cut = greedy_parts(costs, prefix, limit) if is_large[g] and num_shards > 1 else [costs]
        for part in cut:
            expected.append((part, groups.num_prefix_tokens[g] if len(part) > 1 else 0))
            assert len(cut) == 1 or len(part) == 1 or prefix + sum(part) <= limit

    parts = split_large_groups(groups, member_costs, prefix_costs, num_shards)
    assert parts.member_idxs.tolist() == groups.member_idxs.tolist()
    assert [
        (member_costs[parts.members(p)].tolist(), parts.num_prefix_tokens[p])
        for p in range(len(parts))
    ] == expected


def test_a_cut_group_by_hand() -> None:
    """16 of 24 on three shards: parts of 2 + 7 repeat 2 tokens; a fair share is 26 / 3 then."""
    groups = make_groups([14, 8])
    parts = split_large_groups(groups, np.ones(22), np.array([2.0, 0.0]), 3)
    assert parts.offsets.tolist() == [0, 7, 14, 22]
    assert parts.num_prefix_tokens.tolist() == [5, 5, 5]


def test_a_last_member_alone_has_no_prefix() -> None:
    parts = split_large_groups(make_groups([7]), np.ones(7), np.zeros(1), 2)
    assert parts.sizes.tolist() == [3, 3, 1]
    assert parts.num_prefix_tokens.tolist() == [5, 5, 0]


def test_a_group_that_is_nearly_all_prefix_is_not_shredded() -> None:
    """Ten parts of 1,001 tokens would be within 1,001; so many aren't worth what they add."""
    parts = split_large_groups(make_groups([10]), np.ones(10), np.array([1000.0]), 8)
    assert len(parts) <= 8


def test_nothing_to_cut() -> None:
    groups = make_groups([3, 3, 3])
    for num_shards in (1, 3):
        assert split_large_groups(groups, np.ones(9), np.ones(3), num_shards) is groups
    empty = make_groups([])
    assert len(split_large_groups(empty, np.zeros(0), np.zeros(0), 4)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_skewed_job_is_even_after_cutting(seed: int) -> None:
    """One group with 30 % of the work, Zipf share degrees, 8 workers."""
    generator = np.random.default_rng(seed)
    sizes = np.minimum(generator.zipf(1.5, 2000), 300)
    others = sizes.sum()
    sizes = np.append(sizes, round(others * 0.3 / 0.7))
    groups = make_groups(sizes.tolist(), seed)
    member_costs = generator.integers(300, 500, groups.num_prompts).astype(np.float64)
    prefix_costs = np.where(groups.sizes > 1, 1100.0, 0.0)

    def found(groups: PrefixGroups, prefix_costs: np.ndarray) -> float:
        costs = np.add.reduceat(member_costs[groups.member_idxs], groups.offsets[:-1])
        costs += prefix_costs
        return imbalance(costs, assign_shards(costs, 8), 8)

    assert found(groups, prefix_costs) > 1.5
    parts = split_large_groups(groups, member_costs, prefix_costs, 8)
    assert found(parts, np.where(parts.sizes > 1, 1100.0, 0.0)) <= 1.05


def test_bad_costs_are_refused() -> None:
    groups = make_groups([2, 1])
    good, prefix = np.ones(3), np.ones(2)
    with pytest.raises(PlanError):
        split_large_groups(groups, good, prefix, 0)
    with pytest.raises(PlanError, match="prompt 1 "):
        split_large_groups(groups, np.array([1.0, -1.0, 1.0]), prefix, 2)
    with pytest.raises(PlanError, match="group 0 "):
        split_large_groups(groups, good, np.array([np.nan, 0.0]), 2)
    for costs, prefixes in ((good[:2], prefix), (good, prefix[:1])):
        with pytest.raises(PlanError):
            split_large_groups(groups, costs, prefixes, 2)
