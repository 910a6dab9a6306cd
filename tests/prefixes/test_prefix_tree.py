"""The tree against its definition: all pairwise common prefixes, found the slow way."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import PrefixTree, TokenTable, build_prefix_tree, sort_prompts

Prompt = tuple[int, ...]

# Few token ids, so that prompts often agree; some far apart, so that all bytes of a key count.
TOKEN = st.sampled_from([0, 1, 2, 300, 70_000, 2**31 - 1])
LONG_RUNS = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=10
).map(lambda runs: [[1] * before + [token] + [1] * after for before, token, after in runs])
PROMPTS = (
    st.lists(st.lists(TOKEN, max_size=8), max_size=14)
    | st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=14)
    | layered_prompts(16, 9, 4)
    | LONG_RUNS
)


def common_prefix(left: Prompt, right: Prompt) -> Prompt:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]


def check_tree(prompts: list[list[int]], tree: PrefixTree) -> None:
    keys = [tuple(prompt) for prompt in prompts]
    ranked = sorted(range(len(keys)), key=lambda idx: (keys[idx], idx))
    assert tree.prompt_idxs.tolist() == ranked

    inner = {common_prefix(a, b) for a, b in combinations(keys, 2)} - {()}
    expected = {
        (prefix, tuple(r for r, idx in enumerate(ranked) if keys[idx][: len(prefix)] == prefix))
        for prefix in inner
    }
    found, leaves = set(), []
    for node in range(1, len(tree.parent)):
        ranks = tuple(range(tree.leaf_begin[node], tree.leaf_end[node]))
        above = tree.parent[node]
        assert 0 <= above < node
        assert tree.leaf_begin[above] <= ranks[0] <= ranks[-1] < tree.leaf_end[above]
        if len(ranks) == 1:
            leaves.append(ranks[0])
            assert tree.depth[node] == len(keys[ranked[ranks[0]]])
            assert tree.depth[node] >= tree.depth[above]
        else:
            found.add((keys[ranked[ranks[0]]][: tree.depth[node]], ranks))
            assert tree.depth[node] > tree.depth[above]
    assert found == expected
    assert leaves == list(range(len(keys)))
    assert len(tree.parent) == 1 + len(keys) + len(inner)
    assert (tree.parent[0], tree.depth[0]) == (-1, 0)
    assert (tree.leaf_begin[0], tree.leaf_end[0]) == (0, len(keys))


@settings(max_examples=examples(200))
@given(PROMPTS)
@example([])
@example([[]])
@example([[], [], []])
@example([[4]])
@example([[4, 5]] * 3)
@example([[1, 2, 3], [1, 2], [1], [], [1, 2]])
def test_tree_equals_brute_force(prompts: list[list[int]]) -> None:
    check_tree(prompts, build_prefix_tree(TokenTable.from_lists(prompts)))


@pytest.mark.parametrize("length", [15, 16, 17, 47, 48, 49, 111, 1000])
def test_shared_lengths_around_the_compare_stride(length: int) -> None:
    shared = [9] * length
    prompts = [[*shared, 1], [*shared, 2], [*shared, 2, 5], shared, [*shared[:-1], 8]]
    check_tree(prompts, build_prefix_tree(TokenTable.from_lists(prompts)))


def test_a_million_children() -> None:
    num_prompts = 1_000_000
    token_ids = np.random.default_rng(0).permutation(num_prompts).astype(np.int32)
    tree = build_prefix_tree(TokenTable(token_ids, np.arange(num_prompts + 1)))
    assert len(tree.parent) == num_prompts + 1
    assert not tree.parent[1:].any()
    assert np.array_equal(token_ids[tree.prompt_idxs], np.arange(num_prompts))


def test_a_million_tokens_in_one_prompt() -> None:
    long = np.full(1_000_000, 3, dtype=np.int32)
    tree = build_prefix_tree(TokenTable.from_lists([long, long[:-1], [3, 4]]))
    assert tree.depth.max() == 1_000_000
    assert len(tree.parent) == 6


@settings(max_examples=examples(200))
@given(PROMPTS, st.integers(1, 4))
@example([[1] * 8] * 3, 4)
@example([[], []], 4)
def test_what_is_not_cached_is_each_block_once_and_the_rest(
    prompts: list[list[int]], block_size: int
) -> None:
    """Against a set of blocks, prompt after prompt; the last token is always computed."""
    tokens = TokenTable.from_lists(prompts)
    ranked = sort_prompts(tokens)
    seen: set[Prompt] = set()
    expected = []
    for idx in ranked.prompt_idxs.tolist():
        prompt = tuple(prompts[idx])
        ends = range(block_size, len(prompt) + 1, block_size)
        found = [end for end in ends if prompt[:end] in seen and end < len(prompt)]
        expected.append(max(found, default=0))
        seen |= {prompt[:end] for end in ends}
    assert ranked.cached_tokens(tokens.lengths, block_size).tolist() == expected


def test_blocks_without_tokens_are_refused() -> None:
    tokens = TokenTable.from_lists([[1]])
    with pytest.raises(PlanError):
        sort_prompts(tokens).cached_tokens(tokens.lengths, 0)
