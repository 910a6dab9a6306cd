"""Trees over blocks against their definition, with hashes so short that they collide."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import (
    PrefixSearch,
    PrefixTree,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    maximize_reuse,
)
from batchllm_operator.prefixes.search.lcp_tree import rank_prompts
from batchllm_operator.prefixes.search.segment_hashes import HASH_BITS

Blocks = tuple[tuple[int, ...], ...]

PROMPTS = layered_prompts(16, 9, 4) | st.lists(
    st.lists(st.integers(0, 1), max_size=12), max_size=14
)


def build_block_tree(
    tokens: TokenTable, block_size: int, *, hash_bits: int = HASH_BITS
) -> PrefixTree:
    search = PrefixSearch(hash_bits=hash_bits)
    search.add(tokens)
    return search.finish(tokens).in_blocks(block_size).tree(tokens.lengths)


def blocks_of(prompt: list[int], block_size: int) -> Blocks:
    ends = range(block_size, len(prompt) + 1, block_size)
    return tuple(tuple(prompt[end - block_size : end]) for end in ends)


def common_prefix(left: Blocks, right: Blocks) -> Blocks:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]


def check_tree(prompts: list[list[int]], tree: PrefixTree, block_size: int) -> None:
    keys = [blocks_of(prompt, block_size) for prompt in prompts]
    assert sorted(tree.prompt_idxs.tolist()) == list(range(len(prompts)))
    expected = {
        (prefix, frozenset(i for i, key in enumerate(keys) if key[: len(prefix)] == prefix))
        for prefix in {common_prefix(a, b) for a, b in combinations(keys, 2)} - {()}
    }
    found = set()
    for node in range(1, tree.num_nodes):
        idxs = tree.prompt_idxs[tree.leaf_begin[node] : tree.leaf_end[node]].tolist()
        assert tree.leaf_begin[tree.parent[node]] <= tree.leaf_begin[node]
        assert tree.leaf_end[node] <= tree.leaf_end[tree.parent[node]]
        if len(idxs) == 1:
            assert tree.depth[node] == len(prompts[idxs[0]])
        else:
            assert tree.depth[node] % block_size == 0
            found.add((keys[idxs[0]][: tree.depth[node] // block_size], frozenset(idxs)))
    assert found == expected
    assert tree.num_nodes == 1 + len(prompts) + len(expected)


@settings(max_examples=examples(200))
@given(PROMPTS, st.integers(1, 4), st.sampled_from([8, 10, HASH_BITS]))
@example([], 4, HASH_BITS)
@example([[], []], 4, HASH_BITS)
@example([[1] * 8] * 3, 4, HASH_BITS)
@example([[1] * 7, [1] * 8, [1] * 9], 4, HASH_BITS)
def test_tree_equals_brute_force_however_hashes_collide(
    prompts: list[list[int]], block_size: int, hash_bits: int
) -> None:
    tokens = TokenTable.from_lists(prompts)
    check_tree(prompts, build_block_tree(tokens, block_size, hash_bits=hash_bits), block_size)


def test_collisions_among_many_are_resolved() -> None:
    """500 beginnings with 17 bits: about one pair collides, so that some seeds won't do."""
    generator = np.random.default_rng(0)
    firsts = generator.integers(0, 1000, (500, 8))
    prompts = [
        [*first.tolist(), *generator.integers(0, 1000, 11).tolist()]
        for first in firsts
        for _ in range(2)
    ]
    tree = build_block_tree(TokenTable.from_lists(prompts), 8, hash_bits=17)
    assert np.count_nonzero(tree.num_leaves[1:] == 2) == 500
    groups = maximize_reuse(tree)
    assert all(abs(int(np.diff(groups.members(g))[0])) == 1 for g in range(len(groups)))
    assert groups.num_prefix_tokens.tolist() == [8] * 500


@settings(deadline=None)
@given(PROMPTS)
def test_blocks_of_one_token_give_the_exact_tree(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    blocks, exact = build_block_tree(tokens, 1), build_prefix_tree(tokens)
    for name in ("prompt_idxs", "parent", "depth", "leaf_begin", "leaf_end"):
        assert getattr(blocks, name).tolist() == getattr(exact, name).tolist()


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 4), st.sampled_from([8, HASH_BITS]), st.data())
def test_nothing_depends_on_input_order(
    prompts: list[list[int]], block_size: int, hash_bits: int, data: st.DataObject
) -> None:
    found = []
    for variant in (prompts, data.draw(st.permutations(prompts))):
        tree = build_block_tree(TokenTable.from_lists(variant), block_size, hash_bits=hash_bits)
        shape = [tree.parent, tree.depth, tree.leaf_begin, tree.leaf_end]
        found.append(
            ([array.tolist() for array in shape], [variant[idx] for idx in tree.prompt_idxs])
        )
    assert found[0] == found[1]


def test_groups_share_whole_blocks() -> None:
    shared = list(range(100, 150))
    tokens = TokenTable.from_lists([[*shared, n, n] for n in range(3)])
    choice = choose_prefixes(build_block_tree(tokens, 16))
    assert choice.groups.num_prefix_tokens.tolist() == [48]
    assert group_prefill_tokens(choice.groups, tokens.lengths).sum() == 48 + 3 * 4


@settings(max_examples=examples(200))
@given(PROMPTS, st.integers(1, 4))
@example([[1] * 8] * 3, 4)
@example([[], []], 4)
def test_what_is_not_cached_is_each_block_once_and_the_rest(
    prompts: list[list[int]], block_size: int
) -> None:
    """Against a set of blocks, prompt after prompt; the last token is always computed."""
    tokens = TokenTable.from_lists(prompts)
    ranked = rank_prompts(tokens)
    seen: set[Blocks] = set()
    expected = []
    for idx in ranked.prompt_idxs.tolist():
        blocks = blocks_of(prompts[idx], block_size)
        found = [end for end in range(1, len(blocks) + 1) if blocks[:end] in seen]
        most = (len(prompts[idx]) - 1) // block_size
        expected.append(max(0, min(len(found), most)) * block_size)
        seen |= {blocks[:end] for end in range(1, len(blocks) + 1)}
    assert ranked.cached_tokens(tokens.lengths, block_size).tolist() == expected


def test_bad_arguments_are_refused() -> None:
    tokens = TokenTable.from_lists([[n] for n in range(5)])
    with pytest.raises(PlanError):
        build_block_tree(tokens, 0)
    with pytest.raises(PlanError):
        rank_prompts(tokens).cached_tokens(tokens.lengths, 0)
    for hash_bits in (0, 63):
        with pytest.raises(PlanError):
            build_block_tree(tokens, 4, hash_bits=hash_bits)
    with pytest.raises(PlanError, match="don't tell"):
        build_block_tree(tokens, 1, hash_bits=1)  # five prompts, two hashes
