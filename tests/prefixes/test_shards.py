"""Shards: equal within the tolerance, cut where it costs least; against all ways to cut."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples

from batchllm_operator.prefixes import PrefixGroups, cut_into_shards, imbalance, split_groups
from batchllm_operator.prefixes.cuts import TOLERANCE

Prompts = tuple[np.ndarray, np.ndarray]


@st.composite
def prompts(draw: st.DrawFn, max_size: int = 10) -> Prompts:
    """Costs of prompts after the one before, and of what they share with it."""
    most = draw(st.sampled_from([0, 1, 9, 300]))
    alone = draw(st.lists(st.integers(0, most) | st.integers(0, 3), min_size=1, max_size=max_size))
    shared = [0, *(draw(st.integers(0, min(pair))) for pair in pairwise(alone))]
    costs = np.array(alone, dtype=np.float64) - shared
    return costs, np.array(shared, dtype=np.float64)


def shard_costs(case: Prompts, bounds: list[int]) -> list[float]:
    costs, cuts = case
    return [float(cuts[a] + costs[a:b].sum()) for a, b in pairwise(bounds)]


def costliest(case: Prompts, bounds: list[int]) -> float:
    """Of shards with several prompts."""
    sizes = np.diff(bounds)
    return max([c for c, n in zip(shard_costs(case, bounds), sizes, strict=True) if n > 1] + [0.0])


def sum_of_cuts(case: Prompts, bounds: list[int]) -> float:
    return float(case[1][bounds[:-1]].sum())


def all_ways(num_prompts: int, num_shards: int) -> list[list[int]]:
    inner = combinations(range(1, num_prompts), num_shards - 1)
    return [[0, *cuts, num_prompts] for cuts in inner]


@settings(max_examples=examples(500), deadline=None)
@given(prompts(), st.integers(1, 11))
@example((np.zeros(6), np.zeros(6)), 3)
@example((np.ones(9), np.zeros(9)), 4)
@example((np.array([1.0, 1, 1000, 1, 1, 1]), np.array([0.0, 1, 1, 1, 1, 1])), 3)
def test_no_other_way_to_cut_is_better(case: Prompts, num_shards: int) -> None:
    num_prompts = len(case[0])
    found = cut_into_shards(*case, num_shards)
    assert found.dtype == np.int64
    bounds = found.tolist()
    assert bounds[0] == 0 and bounds[-1] == num_prompts
    assert all(begin < end for begin, end in pairwise(bounds)), "no shard is empty"
    assert len(bounds) == min(num_shards, num_prompts) + 1
    ways = all_ways(num_prompts, len(bounds) - 1)
    least = min(costliest(case, way) for way in ways)
    limit = least * (1 + TOLERANCE)
    assert costliest(case, bounds) <= limit * (1 + 1e-9)
    within = [way for way in ways if costliest(case, way) <= limit * (1 - 1e-9) or least == 0]
    if least == 0:
        within = [way for way in ways if costliest(case, way) == 0]
    assert sum_of_cuts(case, bounds) <= min(sum_of_cuts(case, way) for way in within)


def test_a_cut_by_hand() -> None:
    """Three sites of four prompts; the tolerance doesn't reach to the ends of the sites."""
    costs = np.tile([100.0, 10, 10, 10], 3)
    cuts = np.tile([0.0, 100, 100, 100], 3)
    assert cut_into_shards(costs, cuts, 3).tolist() == [0, 4, 8, 12]
    assert cut_into_shards(costs, cuts, 12).tolist() == list(range(13))
    assert cut_into_shards(costs, cuts, 99).tolist() == list(range(13))
    assert cut_into_shards(costs, cuts, 1).tolist() == [0, 12]


def test_a_cheaper_cut_nearby_is_taken() -> None:
    costs, cuts = np.ones(1000), np.ones(1000)
    cuts[[0, 497]] = 0
    assert cut_into_shards(costs, cuts, 2).tolist() == [0, 497, 1000]
    cuts[497], cuts[480] = 1, 0  # more than the tolerance away
    assert cut_into_shards(costs, cuts, 2).tolist() != [0, 480, 1000]


@pytest.mark.parametrize("num_shards", [2, 150, 700, 1999])
def test_many_equal_cuts(num_shards: int) -> None:
    """At one price few shards and many are as cheap: the wanted number lies between."""
    bounds = cut_into_shards(np.full(2000, 5.0), np.full(2000, 3.0), num_shards)
    assert len(bounds) == num_shards + 1
    assert np.diff(bounds).min() >= 1


def test_no_prompts_are_no_shards() -> None:
    assert cut_into_shards(np.zeros(0), np.zeros(0), 3).tolist() == [0]


def test_imbalance_is_max_over_mean() -> None:
    assert imbalance(np.array([6.0, 2.0, 1.0])) == pytest.approx(6 / 3)
    assert imbalance(np.zeros(3)) == 1.0
    assert imbalance(np.zeros(0)) == 1.0


# Groups in several shards


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 6), max_size=8), st.integers(1, 5), st.integers(0, 99))
def test_each_shard_has_its_members_as_a_group(
    sizes: list[int], num_shards: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    num = sum(sizes)
    group_of_rank = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    prompt_at_rank = generator.permutation(num)
    shard_of_prompt = np.empty(num, dtype=np.int64)
    shard_of_prompt[prompt_at_rank] = np.sort(generator.integers(0, num_shards, num))
    members = prompt_at_rank[np.argsort(group_of_rank, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    groups = PrefixGroups(members, offsets, np.where(np.array(sizes, dtype=np.int64) > 1, 7, 0))

    parts, shards = split_groups(groups, shard_of_prompt)
    assert parts.member_idxs.tolist() == members.tolist()
    found = [
        (tuple(parts.members(part).tolist()), int(shards[part]), int(parts.num_prefix_tokens[part]))
        for part in range(len(parts))
    ]
    expected = [
        (chosen, shard, 7 if len(chosen) > 1 else 0)
        for group in range(len(groups))
        for shard in range(num_shards)
        if (chosen := tuple(p for p in groups.members(group) if shard_of_prompt[p] == shard))
    ]
    assert found == expected
