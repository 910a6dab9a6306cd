"""Scheduling order: Eq. 4, its tie-break, and its edge cases."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import (
    PrefixGroups,
    TokenTable,
    build_prefix_tree,
    maximize_reuse,
    order_groups,
)

# A prompt and its estimate; equal prompts get equal estimates below.
PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=16)


def plan(prompts: list[list[int]]) -> tuple[PrefixGroups, np.ndarray]:
    tokens = TokenTable.from_lists(prompts)
    return maximize_reuse(build_prefix_tree(tokens)), tokens.lengths


def estimates(prompts: list[list[int]]) -> np.ndarray:
    return np.array([(sum(prompt) * 7 + len(prompt)) % 5 for prompt in prompts], dtype=np.int64)


@settings(deadline=None)
@given(PROMPTS)
def test_larger_ratio_first_then_lexicographic(prompts: list[list[int]]) -> None:
    groups, lengths = plan(prompts)
    outputs = estimates(prompts)
    keys = []
    for g in range(len(groups)):
        members, cut = groups.members(g).tolist(), int(groups.num_prefix_tokens[g])
        prefill = cut + sum(len(prompts[idx]) - cut for idx in members)
        decode = sum(int(outputs[idx]) for idx in members)
        ratio = Fraction(decode, prefill * len(members)) if prefill else Fraction(10**9)
        keys.append((-ratio, prompts[members[0]], g))
    assert order_groups(groups, lengths, outputs).tolist() == [g for _, _, g in sorted(keys)]


@settings(deadline=None)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_input_order(prompts: list[list[int]], random: object) -> None:
    shuffled = list(prompts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    scheduled = []
    for variant in (prompts, shuffled):
        groups, lengths = plan(variant)
        ordered = groups.take(order_groups(groups, lengths, estimates(variant)))
        scheduled.append([variant[idx] for idx in ordered.member_idxs])
    assert scheduled[0] == scheduled[1]


def test_equal_estimates_give_the_order_of_eq_4() -> None:
    prompts = [[1, 1, 1, n] for n in range(9)] + [[2] * 6, [3] * 13]  # prefill: 12, 6, 13
    groups, lengths = plan(prompts)
    ordered = groups.take(order_groups(groups, lengths, np.full(len(prompts), 100)))
    assert ordered.sizes.tolist() == [1, 9, 1]
    assert ordered.members(0).tolist() == [9]


def test_equal_outputs_put_short_prompts_first() -> None:
    groups, lengths = plan([[1] * 30, [2] * 10, [3] * 20])
    order = order_groups(groups, lengths, np.full(3, 5))
    assert groups.take(order).member_idxs.tolist() == [1, 2, 0]


def test_empty_prompts_come_first_and_do_not_divide_by_zero() -> None:
    groups, lengths = plan([[4], [], []])
    order = order_groups(groups, lengths, np.array([9, 0, 3]))
    assert groups.take(order).member_idxs.tolist() == [1, 2, 0]


def test_no_groups() -> None:
    groups, lengths = plan([])
    assert order_groups(groups, lengths, np.zeros(0, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("outputs", [[1], [1, -1], [1.0, 1.0]])
def test_bad_estimates_are_refused(outputs: list[int]) -> None:
    groups, lengths = plan([[1], [2]])
    with pytest.raises(PlanError):
        order_groups(groups, lengths, np.array(outputs))
