"""Orders that keep subtrees together, against the definition over lists of tokens."""

from fractions import Fraction
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benchmark_modules import load
from support.levels import examples
from support.prefix_prompts import layered_prompts

from batchllm_operator.prefixes import (
    BY_RATIO,
    PrefixGroups,
    PrefixTree,
    TokenTable,
    build_prefix_tree,
    maximize_reuse,
    order_groups_by_subtree,
    prefix_sharing_groups,
)

cached_tokens = load("block_cache").cached_tokens

Prompt = tuple[int, ...]


def plan(prompts: list[list[int]]) -> tuple[PrefixGroups, PrefixTree, TokenTable]:
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    return maximize_reuse(tree), tree, tokens


def estimates(prompts: list[list[int]]) -> np.ndarray:
    return np.array([(sum(prompt) * 7 + len(prompt)) % 5 for prompt in prompts], dtype=np.int64)


def branching_prefixes(prompts: list[list[int]]) -> set[Prompt]:
    found = set()
    for left, right in combinations(prompts, 2):
        length = 0
        while length < min(len(left), len(right)) and left[length] == right[length]:
            length += 1
        found.add(tuple(left[:length]))
    return found - {()}


def subtrees_of(
    groups: PrefixGroups, prompts: list[list[int]], min_shared_tokens: int
) -> list[list[Prompt]]:
    """The subtrees around each group, from the outermost, as prefixes."""
    branching = branching_prefixes(prompts)
    around = []
    for g in range(len(groups)):
        member = prompts[groups.members(g)[0]]
        chain: list[Prompt] = [()]
        for length in range(1, (int(groups.num_prefix_tokens[g]) or len(member)) + 1):
            prefix = tuple(member[:length])
            if prefix in branching and length - len(chain[-1]) >= min_shared_tokens:
                chain.append(prefix)
        around.append(chain)
    return around


def order_by_definition(
    groups: PrefixGroups, prompts: list[list[int]], min_shared_tokens: int
) -> list[int]:
    outputs = estimates(prompts)
    around = subtrees_of(groups, prompts, min_shared_tokens)

    def key(inside: list[int]) -> tuple[Fraction, tuple[list[int], int]]:
        members = [idx for g in inside for idx in groups.members(g).tolist()]
        decode = Fraction(sum(int(outputs[idx]) for idx in members), len(members))
        prefixes = sum(int(groups.num_prefix_tokens[g]) for g in inside)
        cut = {i: int(groups.num_prefix_tokens[g]) for g in inside for i in groups.members(g)}
        prefill = Fraction(prefixes + sum(len(prompts[i]) - cut[i] for i in members), len(inside))
        first = min((prompts[idx], idx) for idx in members)
        return (-decode / prefill if prefill else -Fraction(10**9)), first

    def listed(inside: list[int], level: int) -> list[int]:
        items: dict[object, list[int]] = {}
        for g in inside:
            chain = around[g]
            items.setdefault(g if len(chain) == level else chain[level], []).append(g)
        result = []
        for name, item in sorted(items.items(), key=lambda pair: key(pair[1])):
            result += item if isinstance(name, int) else listed(item, level + 1)
        return result

    return listed(list(range(len(groups))), 1)


@settings(max_examples=examples(200))
@given(layered_prompts(30, 5), st.integers(1, 8) | st.just(BY_RATIO), st.randoms())
def test_order_is_the_defined_one(
    prompts: list[list[int]], min_shared_tokens: int, random: Random
) -> None:
    groups, tree, _ = plan(prompts)
    groups = groups.take(random.sample(range(len(groups)), len(groups)))
    order = order_groups_by_subtree(groups, tree, estimates(prompts), min_shared_tokens)
    assert order.tolist() == order_by_definition(groups, prompts, min_shared_tokens)


def test_an_average_group_speaks_for_its_subtree() -> None:
    """Small groups of one subtree come before a large lone group, although they are many."""
    site = [7] * 64
    prompts = [[*site, *[page] * 100, end] for page in range(8) for end in (20, 21)]
    prompts += [[9] * 300]
    groups, tree, _ = plan(prompts)
    ones = np.ones(len(prompts), dtype=np.int64)
    order = order_groups_by_subtree(groups, tree, ones)
    assert order.tolist() == list(range(9))
    assert order.tolist() == order_groups_by_subtree(groups, tree, ones, BY_RATIO).tolist()


def test_neighbours_find_their_common_prefix_in_a_small_cache() -> None:
    """40 sites with 96 tokens, 6 documents each; documents of a site differ in length."""
    generator = np.random.default_rng(0)
    prompts = []
    for _ in range(40):
        site = generator.integers(0, 1000, 96)
        for length in generator.permutation(6):
            document = generator.integers(0, 1000, 200 + 100 * int(length))
            prompts += [
                np.concatenate([site, document, generator.integers(0, 1000, 40)]) for _ in range(3)
            ]
    tokens = TokenTable.from_lists(prompts)
    tree = build_prefix_tree(tokens)
    groups = maximize_reuse(tree)
    ones = np.ones(len(prompts), dtype=np.int64)
    found = [
        cached_tokens(tree, groups.take(order).member_idxs, 16, 200)
        for order in (
            order_groups_by_subtree(groups, tree, ones, BY_RATIO),
            order_groups_by_subtree(groups, tree, ones),
        )
    ]
    assert found[1] - found[0] >= 40 * 5 * 96 * 0.9
    assert found[1] == cached_tokens(tree, np.arange(len(prompts)), 16, 10**6)


def test_empty_prompts_come_first_and_do_not_divide_by_zero() -> None:
    groups, tree, _ = plan([[4], [], []])
    order = order_groups_by_subtree(groups, tree, np.array([9, 0, 3]), BY_RATIO)
    assert groups.take(order).member_idxs.tolist() == [1, 2, 0]


# Lists in, (prefix, distinct parts) out


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=16))
def test_every_prompt_can_be_put_together_again(prompts: list[list[int]]) -> None:
    groups = prefix_sharing_groups(prompts)
    rebuilt = [prefix + distinct for prefix, parts in groups for distinct in parts]
    assert sorted(rebuilt) == sorted(prompts)
    assert all((len(parts) > 1) == bool(prefix) for prefix, parts in groups)


def test_groups_with_much_decoding_per_prefill_come_first() -> None:
    groups = prefix_sharing_groups([[9] * 8, [1, 2, 3], [1, 2, 4, 4], [5]])
    # R: 1/1 for [5]; 2/(2 + 1 + 2) for the pair; 1/8 for the long one.
    assert groups == [([], [[5]]), ([1, 2], [[3], [4, 4]]), ([], [[9] * 8])]


# The cache of blocks that orders are compared by


cached_tokens = load("block_cache").cached_tokens


@pytest.mark.parametrize(
    ("order", "num_blocks", "expected"),
    [
        ([1, 0, 1], 100, 6),  # its last token is computed
        ([1, 0, 1], 6, 4),  # the last blocks are the first to go
        ([1, 0, 1], 4, 0),
        ([0, 3], 4, 4),  # of 5 tokens, 2 blocks; another's last one isn't whole
        ([], 6, 0),
    ],
)
def test_the_oldest_blocks_go(order: list[int], num_blocks: int, expected: int) -> None:
    prompts = [[1] * 8, [2] * 8, [3] * 8, [1] * 5]
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    assert cached_tokens(tree, order, 2, num_blocks) == expected
