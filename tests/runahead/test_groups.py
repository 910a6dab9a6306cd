"""Prefixes to compute together: what an engine can compute, and which blocks each replica does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runahead import COST, splits

from batchllm_operator.runahead.groups import ChainLimits, RunaheadGroup
from batchllm_operator.runahead.prediction import Chain

BLOCK = 32
LIMITS = ChainLimits(block_size=BLOCK, num_blocks=100, max_chunk=512, max_model_len=2048)


def group(*split: int, num_tokens: int | None = None) -> RunaheadGroup:
    return RunaheadGroup(0, list(range(sum(split) if num_tokens is None else num_tokens)), split)


def test_a_group_that_fits_is_accepted() -> None:
    assert group(512, 512, 100).reason_against(3, LIMITS) is None


@pytest.mark.parametrize(
    ("refused", "limits", "reason"),
    [
        (group(64, 64), {}, "chunks of (64, 64) tokens for 3 replicas"),
        (group(64, 0, 64), {}, "chunks of (64, 0, 64) tokens"),
        (group(64, 64, 64, num_tokens=200), {}, "chunks have 192 tokens, its prefix 200"),
        (group(64, 40, 64), {}, "chunk 1 of 40 tokens doesn't end with a KV block"),
        (group(64, 64, 513), {}, "chunk 2 of 513 tokens is larger than the 512 that fit a step"),
        (group(512, 512, 64), {"max_model_len": 1000}, "don't fit max_model_len 1000"),
        (group(512, 512, 64), {"num_blocks": 34}, "fills the KV cache"),
    ],
)
def test_a_group_that_can_not_be_computed_is_refused(
    refused: RunaheadGroup, limits: dict[str, int], reason: str
) -> None:
    assert reason in (refused.reason_against(3, replace(LIMITS, **limits)) or "")


@given(split=st.integers(1, 5).flatmap(lambda p: splits(Chain(COST, p, 1e9, block_size=BLOCK))))
def test_each_whole_block_of_a_prefix_is_computed_by_one_replica(split: tuple[int, ...]) -> None:
    made = group(*split)
    extents = made.extents(BLOCK)
    blocks = [block for first, last in extents for block in range(first, last)]
    assert blocks == list(range(sum(split) // BLOCK))
    assert made.num_whole(BLOCK) == len(blocks) * BLOCK
    for rank, (first, last) in enumerate(extents):
        begin, end = made.bounds(rank)
        assert end - begin == split[rank]
        assert begin <= first * BLOCK <= last * BLOCK <= end
