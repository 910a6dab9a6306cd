"""A chain for each of many long prefixes: takes a while to search."""

from __future__ import annotations

import dataclasses

from support.runahead import CPU_COST

from batchllm_operator.runahead.planning import (
    Chain,
    GroupLoad,
    Link,
    PlacementSettings,
    choose_placement,
    search_split,
)

CPU_CHAIN = Chain(CPU_COST, Link(1e9, 1e-4), 32, 8192)


def test_of_many_lengths_splits_are_interpolated() -> None:
    """A chain of eight for each of 20 books: no more searches than take a second or two."""
    chain = dataclasses.replace(CPU_CHAIN, max_step_tokens=None)
    groups = [GroupLoad(20_000 + 1111 * idx, 2, 10, 1) for idx in range(20)]
    found = choose_placement(groups[::-1], chain, PlacementSettings(8))
    assert found.policy == "runahead"
    assert len(found.splits) >= 4
    for idx, split in zip(found.runahead_idxs, found.splits, strict=True):
        length = groups[::-1][idx].prefix_tokens
        chain.check_split(split, length)
        best = chain.times(search_split(chain, length, 8, "whole_prefix"))
        assert max(chain.times(split).whole_s) <= 1.02 * max(best.whole_s)
