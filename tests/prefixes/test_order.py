"""Scheduling order: Eq. 4, its tie-break, and its edge cases."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.prefixes import (
    BY_RATIO,
    PrefixGroups,
    TokenTable,
    build_prefix_tree,
    maximize_reuse,
    order_groups_by_subtree,
)

# A prompt and its estimate; equal prompts get equal estimates below.
PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=16)


def plan(prompts: list[list[int]], outputs: np.ndarray) -> tuple[PrefixGroups, np.ndarray]:
    """Groups, and their order by ratio."""
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    groups = maximize_reuse(tree)
    return groups, order_groups_by_subtree(groups, tree, outputs, BY_RATIO)


def estimates(prompts: list[list[int]]) -> np.ndarray:
    return np.array([(sum(prompt) * 7 + len(prompt)) % 5 for prompt in prompts], dtype=np.int64)


@settings(deadline=None)
@given(PROMPTS)
def test_larger_ratio_first_then_lexicographic(prompts: list[list[int]]) -> None:
    outputs = estimates(prompts)
    groups, order = plan(prompts, outputs)
    keys = []
    for g in range(len(groups)):
        members, cut = groups.members(g).tolist(), int(groups.num_prefix_tokens[g])
        prefill = cut + sum(len(prompts[idx]) - cut for idx in members)
        decode = sum(int(outputs[idx]) for idx in members)
        ratio = Fraction(decode, prefill * len(members)) if prefill else Fraction(10**9)
        keys.append((-ratio, prompts[members[0]], g))
    assert order.tolist() == [g for _, _, g in sorted(keys)]


@settings(deadline=None)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_input_order(prompts: list[list[int]], random: object) -> None:
    shuffled = list(prompts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    scheduled = []
    for variant in (prompts, shuffled):
        groups, order = plan(variant, estimates(variant))
        ordered = groups.take(order)
        scheduled.append([variant[idx] for idx in ordered.member_idxs])
    assert scheduled[0] == scheduled[1]


def test_equal_estimates_give_the_order_of_eq_4() -> None:
    prompts = [[1, 1, 1, n] for n in range(9)] + [[2] * 6, [3] * 13]  # prefill: 12, 6, 13
    groups, order = plan(prompts, np.full(len(prompts), 100))
    ordered = groups.take(order)
    assert ordered.sizes.tolist() == [1, 9, 1]
    assert ordered.members(0).tolist() == [9]


def test_equal_outputs_put_short_prompts_first() -> None:
    groups, order = plan([[1] * 30, [2] * 10, [3] * 20], np.full(3, 5))
    assert groups.take(order).member_idxs.tolist() == [1, 2, 0]


def test_empty_prompts_come_first_and_do_not_divide_by_zero() -> None:
    groups, order = plan([[4], [], []], np.array([9, 0, 3]))
    assert groups.take(order).member_idxs.tolist() == [1, 2, 0]


def test_no_groups() -> None:
    assert plan([], np.zeros(0, dtype=np.int64))[1].tolist() == []
