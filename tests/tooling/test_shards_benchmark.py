"""The benchmark of shards: what it counts as found in a cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load

from batchllm_operator.prefixes import PrefixGroups

benchmark = load("shards")


@settings(max_examples=50)
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
