"""Both choices of prefixes side by side."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.prefixes import (
    PrefixGroups,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    group_prefill_tokens,
    maximize_reuse,
)
from batchllm_operator.prefixes.exact import cut_exactly

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=24)

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
@given(PROMPTS)
def test_savings_are_those_of_the_groups(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    choice = choose_prefixes(tree)
    assert choice.algorithm_1_saved_tokens <= choice.exact_saved_tokens
    for num_saved, groups in (
        (choice.algorithm_1_saved_tokens, maximize_reuse(tree)),
        (choice.exact_saved_tokens, cut_exactly(tree).groups()),
        (choice.exact_saved_tokens, choice.groups),
    ):
        assert num_saved == tokens.num_tokens - group_prefill_tokens(groups, tokens.lengths).sum()


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
