"""The exact choice of prefixes against all choices there are, and against a dense table."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.prefixes import (
    PrefixGroups,
    PrefixTree,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    maximize_reuse,
)
from batchllm_operator.prefixes.exact import cut_exactly


def chain(edges: np.ndarray, leaves_per_level: int) -> PrefixTree:
    """A path of inner nodes, each with leaves one token below it, the deepest with one more."""
    num_levels = len(edges)
    path = np.concatenate([[0], np.cumsum(edges)])
    hangs_on = np.append(num_levels, np.repeat(np.arange(num_levels, 0, -1), leaves_per_level))
    ranks = np.arange(len(hangs_on))
    below = np.append(len(ranks), len(ranks) - np.arange(num_levels) * leaves_per_level)
    return PrefixTree(
        prompt_idxs=ranks,
        parent=np.concatenate([np.arange(-1, num_levels), hangs_on]),
        depth=np.concatenate([path, path[hangs_on] + 1]),
        leaf_begin=np.concatenate([np.zeros(num_levels + 1, dtype=np.int64), ranks]),
        leaf_end=np.concatenate([below, ranks + 1]),
    )


def shared_prefixes(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    return {
        tuple(a[:n])
        for a, b in combinations(prompts, 2)
        for n in range(1, min(len(a), len(b)) + 1)
        if a[:n] == b[:n]
    }


def best_of_all_choices(prompts: list[list[int]]) -> int:
    """Tries every set of prefixes, those that end inside an edge included."""
    shared = shared_prefixes(prompts)
    best = 0
    for size in range(len(shared) + 1):
        for chosen in combinations(sorted(shared), size):
            deepest = [
                max((len(c) for c in chosen if tuple(prompt[: len(c)]) == c), default=0)
                for prompt in prompts
            ]
            best = max(best, sum(deepest) - sum(map(len, chosen)))
    return best


def best_by_table(tree: PrefixTree) -> int:
    """F_v(d) for all nodes and depths of ancestors, as the recurrence has it."""
    table = np.zeros((len(tree.parent), int(tree.depth.max(initial=0)) + 1), dtype=np.int64)
    is_leaf = np.bincount(tree.parent[1:], minlength=len(tree.parent)) == 0
    for node in range(len(tree.parent) - 1, 0, -1):
        depth = int(tree.depth[node])
        if is_leaf[node]:
            table[node] = np.arange(table.shape[1])
        else:
            table[node] = np.maximum(table[node], table[node, depth] - depth)
        table[tree.parent[node]] += table[node]
    return int(table[0, 0])


@settings(max_examples=examples(150))
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8).filter(
        lambda prompts: len(shared_prefixes(prompts)) <= 9
    )
)
@example([])
@example([[]])
@example([[0]])
@example([[], []])
@example([[0, 0]] * 3 + [[0]])
def test_no_choice_of_prefixes_saves_more(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    assert choose_prefixes(build_prefix_tree(tokens)).exact_saved_tokens == best_of_all_choices(
        prompts
    )


@settings(max_examples=examples(200))
@given(layered_prompts(60, 9))
def test_saves_what_the_recurrence_says(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    choice = choose_prefixes(tree)
    groups = choice.groups
    assert choice.exact_saved_tokens == best_by_table(tree)
    assert tokens.num_tokens - group_prefill_tokens(groups, tokens.lengths).sum() == (
        choice.exact_saved_tokens
    )
    assert sorted(groups.member_idxs.tolist()) == list(range(len(prompts)))
    for g in range(len(groups)):
        cut = int(groups.num_prefix_tokens[g])
        members = [prompts[idx] for idx in groups.members(g)]
        assert len({tuple(member[:cut]) for member in members}) == 1
        assert members == sorted(members)
    firsts = [prompts[groups.members(g)[0]] for g in range(len(groups))]
    assert firsts == sorted(firsts)


@settings(deadline=None)
@given(layered_prompts(60, 9))
def test_each_cut_is_needed(prompts: list[list[int]]) -> None:
    """Without it, its prompts would use the cut above and the choice would save less."""
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    cut, _ = cut_exactly(tree)
    users = cut[1:][tree.num_leaves[1:] == 1]
    for node in set(cut.tolist()) - {0}:
        num_users = np.count_nonzero(users == node)
        above = tree.depth[cut[tree.parent[node]]]
        assert num_users * (tree.depth[node] - above) > tree.depth[node]


@pytest.mark.parametrize("leaves_per_level", [1, 3])
@pytest.mark.parametrize("shape", ["even", "uneven", "rising", "falling"])
def test_chains(shape: str, leaves_per_level: int) -> None:
    generator = np.random.default_rng(0)
    edges = {
        "even": np.ones(400, dtype=np.int64),
        "uneven": np.minimum(generator.zipf(1.5, 400), 50),
        "rising": np.arange(1, 80),
        "falling": np.arange(80, 0, -1),
    }[shape]
    tree = chain(edges, leaves_per_level)
    assert cut_exactly(tree)[1] == best_by_table(tree)


def test_ten_thousand_levels() -> None:
    """One prompt leaves at each level: G_v(d) = d + F_child(d), one row of the table at a time.

    Neither choice recurses.
    """
    num_levels = 10_000
    tree = chain(np.ones(num_levels, dtype=np.int64), 1)
    ancestors = np.arange(num_levels + 1)
    table = 2 * ancestors
    for depth in range(num_levels, 0, -1):
        table = np.maximum(table, table[depth] - depth)
        table += ancestors if depth > 1 else 0
    choice = choose_prefixes(tree)
    assert choice.exact_saved_tokens == table[0]
    groups = choice.groups
    assert np.array_equal(np.sort(groups.member_idxs), np.arange(num_levels + 1))
    assert int(((groups.sizes - 1) * groups.num_prefix_tokens).sum()) == table[0]


def test_a_million_children() -> None:
    num_prompts = 1_000_000
    tree = chain(np.array([2]), num_prompts - 1)
    choice = choose_prefixes(tree)
    assert choice.exact_saved_tokens == 2 * (num_prompts - 1)
    assert choice.groups.sizes.tolist() == [num_prompts]


# Both choices side by side


FIGURE_4 = [
    [0, 50, 51],
    [1, 2, 4, 52],
    [1, 2, 5, 53],
    [1, 2, 6, 7, 8, 9, 10, 11, 54],
    [1, 2, 6, 7, 8, 9, 10, 11, 55],
    [1, 3, 56],
]
"""Prompts 1 to 6 of the paper's Fig. 4; 'b' is token 1."""

INTERLOCKED = [[1, 1], [1, 1, 2, 2], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 3], [1, 1, 2, 2, 3, 3, 3]]
"""Three levels with 2, 2 and 3 tokens; one prompt ends at the first, two at each other."""


def listed(groups: PrefixGroups) -> list[tuple[int, list[int]]]:
    return [
        (int(groups.num_prefix_tokens[g]), groups.members(g).tolist()) for g in range(len(groups))
    ]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=24))
def test_algorithm_1_saves_what_its_groups_do_and_no_more(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    choice = choose_prefixes(tree)
    assert choice.algorithm_1_saved_tokens <= choice.exact_saved_tokens
    num_computed = group_prefill_tokens(maximize_reuse(tree), tokens.lengths).sum()
    assert choice.algorithm_1_saved_tokens == tokens.num_tokens - num_computed


def test_equal_savings_leave_the_papers_groups() -> None:
    """Fig. 4: sharing 'b' and one more token with one prompt less saves just as much."""
    choice = choose_prefixes(build_prefix_tree(TokenTable.from_lists(FIGURE_4)))
    assert choice.algorithm_1_saved_tokens == choice.exact_saved_tokens == 2 + 8
    assert listed(choice.groups) == [(0, [0]), (1, [1, 2, 5]), (8, [3, 4])]


def test_the_exact_choice_is_taken_where_it_saves_more() -> None:
    """Algorithm 1 forks 7 tokens for two prompts off, which leaves the others with 2 to share."""
    tree = build_prefix_tree(TokenTable.from_lists(INTERLOCKED))
    choice = choose_prefixes(tree)
    assert (choice.algorithm_1_saved_tokens, choice.exact_saved_tokens) == (7 + 2 * 2, 3 * 4)
    assert listed(choice.groups) == [(0, [0]), (4, [1, 2, 3, 4])]
