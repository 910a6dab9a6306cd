"""Algorithm 1 against a recursive version that follows the paper line by line."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prefixes.test_exact import listed
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.prefixes import (
    PrefixGroups,
    TokenTable,
    group_prefill_tokens,
    maximize_reuse,
    saving_ratio,
    sort_prompts,
)

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=24)


@dataclass
class Node:
    num_tokens: int
    children: list[Node] = field(default_factory=list)
    member: int | None = None

    def members(self) -> list[int]:
        if self.member is not None:
            return [self.member]
        return [idx for child in self.children for idx in child.members()]


def grow(prompts: list[list[int]], idxs: list[int], start: int) -> list[Node]:
    """Children for the prompts `idxs`, which all agree in their first `start` tokens."""
    by_token: dict[int, list[int]] = {}
    nodes = []
    for idx in idxs:
        if len(prompts[idx]) == start:
            nodes.append(Node(0, member=idx))
        else:
            by_token.setdefault(prompts[idx][start], []).append(idx)
    for alike in by_token.values():
        if len(alike) == 1:
            nodes.append(Node(len(prompts[alike[0]]) - start, member=alike[0]))
            continue
        end = start
        while len({tuple(prompts[idx][: end + 1]) for idx in alike}) == 1 and all(
            len(prompts[idx]) > end for idx in alike
        ):
            end += 1
        nodes.append(Node(end - start, grow(prompts, alike, end)))
    return nodes


def maximize(parent: Node) -> None:
    for child in list(parent.children):
        if not child.children:
            continue
        maximize(child)
        for grandchild in list(child.children):
            gain = (len(grandchild.members()) - 1) * grandchild.num_tokens
            if gain > child.num_tokens:
                child.children.remove(grandchild)
                grandchild.num_tokens += child.num_tokens
                parent.children.append(grandchild)
        if not child.children:
            parent.children.remove(child)
        elif len(child.children) == 1:
            only = child.children[0]
            child.num_tokens += only.num_tokens
            child.children, child.member = only.children, only.member


def reference_groups(prompts: list[list[int]]) -> set[tuple[int, frozenset[int]]]:
    root = Node(0, grow(prompts, list(range(len(prompts))), 0))
    maximize(root)
    return {
        (0 if node.member is not None else node.num_tokens, frozenset(node.members()))
        for node in root.children
    }


def as_set(groups: PrefixGroups) -> set[tuple[int, frozenset[int]]]:
    return {(length, frozenset(members)) for length, members in listed(groups)}


def plan(prompts: list[list[int]]) -> tuple[PrefixGroups, TokenTable, int]:
    """Groups by Algorithm 1, the tokens, and how many of them a multi-level plan computes."""
    tokens = TokenTable.from_lists(prompts)
    ranked = sort_prompts(tokens)
    groups = maximize_reuse(ranked.tree(tokens.lengths))
    return groups, tokens, tokens.num_tokens - int(ranked.num_shared_tokens.sum())


@settings(max_examples=examples(300))
@given(PROMPTS | layered_prompts())
@example([])
@example([[], [], []])
@example([[1, 1]] * 3 + [[1]])
@example([[7, 8, 9]] * 50)
@example([[i, 1] for i in range(50)])
@example([[1, 2], [1, 2, 3]])
# [1] is left with [1, 2, 2] once the 3s are gone, so those two share 3 tokens, not 1.
@example([[1, 2, 2, 5], [1, 2, 2, 6], *([1, 3, 3, 3, i] for i in range(3))])
def test_groups_equal_the_recursive_algorithm(prompts: list[list[int]]) -> None:
    groups, tokens, optimum = plan(prompts)
    assert as_set(groups) == reference_groups(prompts)
    assert sorted(groups.member_idxs.tolist()) == list(range(len(prompts)))
    processed = 0
    for g in range(len(groups)):
        cut = int(groups.num_prefix_tokens[g])
        members = [prompts[idx] for idx in groups.members(g)]
        assert len({tuple(member[:cut]) for member in members}) == 1
        assert all(len(member) >= cut for member in members)
        assert (cut > 0) == (len(members) > 1)
        assert members == sorted(members)
        processed += cut + sum(len(member) - cut for member in members)
    assert group_prefill_tokens(groups, tokens.lengths).sum() == processed
    assert optimum <= processed <= tokens.num_tokens
    firsts = [prompts[groups.members(g)[0]] for g in range(len(groups))]
    assert firsts == sorted(firsts)


def test_saving_ratio_is_a_fraction() -> None:
    assert saving_ratio(44, 100) == pytest.approx(0.56)
    assert saving_ratio(100, 100) == 0.0
    assert saving_ratio(0, 0) == 0.0


def test_take_reorders_groups() -> None:
    groups = plan([[1, 2], [5], [1, 3], [7, 7, 7], [7, 7, 8]])[0]
    taken = groups.take([2, 0])
    assert [taken.members(g).tolist() for g in range(2)] == [
        groups.members(2).tolist(),
        groups.members(0).tolist(),
    ]
    assert taken.num_prefix_tokens.tolist() == [2, 1]
    assert len(groups.take([])) == 0
