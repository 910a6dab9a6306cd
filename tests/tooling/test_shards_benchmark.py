"""The benchmark of shards: how its baseline deals, and what it counts as found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load

from batchllm_operator.prefixes import PrefixGroups, imbalance

deal_out = load("dealt_groups").deal_out
benchmark = load("shards")


@pytest.mark.parametrize("seed", range(2))
def test_a_skewed_job_is_dealt_evenly(seed: int) -> None:
    """One group with 30 % of the work, Zipf share degrees, 8 workers."""
    generator = np.random.default_rng(seed)
    sizes = np.minimum(generator.zipf(1.5, 500), 300)
    sizes = np.append(sizes, round(sizes.sum() * 0.3 / 0.7))
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    prefix = np.where(sizes > 1, 1100, 0).astype(np.int64)
    groups = PrefixGroups(generator.permutation(offsets[-1]), offsets, prefix)
    costs = generator.integers(300, 500, groups.num_prompts).astype(np.float64)
    shards = deal_out(groups, costs, prefix.astype(np.float64), 8)
    shard_costs = np.bincount(shards, weights=costs, minlength=8)
    for group_idx in range(len(groups)):
        shard_costs[np.unique(shards[groups.members(group_idx)])] += prefix[group_idx]
    assert imbalance(shard_costs) <= 1.05
    assert len(np.unique(shards[groups.members(len(groups) - 1)])) > 1, "the largest is cut"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1), st.data())
def test_a_shard_finds_what_its_own_prompts_share(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    job = benchmark.Job.of([np.array(prompt, dtype=np.int32) for prompt in prompts])
    chosen = data.draw(st.sets(st.integers(0, len(prompts) - 1), min_size=1))
    idxs = np.array(sorted(chosen), dtype=np.int64)
    alone = PrefixGroups(idxs, np.arange(len(idxs) + 1), np.zeros(len(idxs), dtype=np.int64))
    ranks, cached = benchmark.found_in_cache(job, alone)
    seen: set[tuple[int, ...]] = set()
    for idx, found in zip(ranks.tolist(), cached.tolist(), strict=True):
        prompt = tuple(job.tokens.prompt(idx).tolist())
        ends = range(16, len(prompt) + 1, 16)
        known = [end for end in ends if prompt[:end] in seen and end < len(prompt)]
        assert found == max(known, default=0)
        seen |= {prompt[:end] for end in ends}
    assert sorted(ranks.tolist()) == idxs.tolist()
