"""The block cache against one that keeps every block's tokens in an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import TokenTable, build_prefix_tree

cached_tokens = load("block_cache").cached_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=12)


def found_in_dictionary(
    prompts: list[list[int]], order: list[int], block_size: int, num_blocks: int
) -> int:
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()  # oldest first
    found = 0
    for idx in order:
        prompt = prompts[idx]
        ends = range(block_size, len(prompt) + 1, block_size)
        blocks = [tuple(prompt[:end]) for end in ends]
        for end, block in zip(ends, blocks, strict=True):
            if block not in cache:
                break
            found += block_size if end < len(prompt) else 0
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return found


@settings(max_examples=examples(300))
@given(PROMPTS, st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
@example([[0, 0], [0, 0]], 2, 5, None)
@example([[], []], 1, 1, None)
def test_finds_what_a_dictionary_of_blocks_finds(
    prompts: list[list[int]], block_size: int, num_blocks: int, random: object
) -> None:
    order = list(range(len(prompts)))
    if random is not None:
        random.shuffle(order)  # type: ignore[attr-defined]
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    found = cached_tokens(tree, np.array(order, dtype=np.int64), block_size, num_blocks)
    assert found == found_in_dictionary(prompts, order, block_size, num_blocks)


@settings(deadline=None)
@given(PROMPTS)
def test_an_endless_cache_is_the_multi_level_optimum(prompts: list[list[int]]) -> None:
    distinct = [list(prompt) for prompt in {tuple(p) for p in prompts}]
    ended = [[*prompt, 2 + idx] for idx, prompt in enumerate(distinct)]  # none is fully cached
    tokens = TokenTable.from_lists(ended)
    tree = build_prefix_tree(tokens)
    found = cached_tokens(tree, np.arange(len(ended)), 1, 10_000)
    assert found == tokens.num_tokens - tree.num_distinct_prefix_tokens


def test_part_of_the_prompts_and_one_of_them_twice() -> None:
    tree = build_prefix_tree(TokenTable.from_lists([[1] * 8, [2] * 8, [3] * 8]))
    assert cached_tokens(tree, np.array([1, 0, 1]), 2, 100) == 6  # its last token is computed
    assert cached_tokens(tree, np.array([1, 0, 1]), 2, 6) == 4
    assert cached_tokens(tree, np.array([], dtype=np.int64), 2, 6) == 0


def test_what_does_not_fit_is_refused() -> None:
    tree = build_prefix_tree(TokenTable.from_lists([[1]]))
    idxs = np.zeros(1, dtype=np.int64)
    for arguments in ((idxs, 0, 1), (idxs, 1, 0), (idxs + 1, 1, 1), (idxs - 1, 1, 1)):
        with pytest.raises(PlanError):
            cached_tokens(tree, *arguments)
