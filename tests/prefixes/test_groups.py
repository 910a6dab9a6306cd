"""The paper's standalone interface: lists in, (prefix, distinct parts) out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import TokenTable, optimal_saving_ratio, prefix_sharing_groups


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=16))
def test_every_prompt_can_be_put_together_again(prompts: list[list[int]]) -> None:
    groups = prefix_sharing_groups(prompts)
    rebuilt = [prefix + distinct for prefix, parts in groups for distinct in parts]
    assert sorted(rebuilt) == sorted(prompts)
    assert all((len(parts) > 1) == bool(prefix) for prefix, parts in groups)


def test_output_shape_and_order() -> None:
    groups = prefix_sharing_groups([[9] * 8, [1, 2, 3], [1, 2, 4, 4], [5]])
    # R: 1/1 for [5]; 2/(2 + 1 + 2) for the pair; 1/8 for the long one.
    assert groups == [([], [[5]]), ([1, 2], [[3], [4, 4]]), ([], [[9] * 8])]


def test_nothing_in_nothing_out() -> None:
    assert prefix_sharing_groups([]) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12))
def test_equal_prompts_are_computed_once_if_their_outputs_are_equal(
    prompts: list[list[int]],
) -> None:
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    num_saved = sum(map(len, prompts)) - sum(map(len, distinct))
    merged = optimal_saving_ratio(TokenTable.from_lists(prompts), 1, merge=True)
    once = optimal_saving_ratio(TokenTable.from_lists(distinct), 1, merge=False)
    assert merged * sum(map(len, prompts)) == pytest.approx(
        num_saved + once * sum(map(len, distinct))
    )


def test_prompts_whose_outputs_differ_are_computed_each() -> None:
    tokens = TokenTable.from_lists([[1, 2], [1, 2], [1, 3]])
    assert optimal_saving_ratio(tokens, 1, merge=False) == pytest.approx(1 / 3)
    assert optimal_saving_ratio(tokens, 1, merge=True) == 0.5
    assert optimal_saving_ratio(tokens, 2, merge=False) == 0
    assert optimal_saving_ratio(TokenTable.from_lists([]), 2, merge=False) == 0


def test_bad_tokens_are_refused() -> None:
    with pytest.raises(PlanError, match="prompt 1 "):
        prefix_sharing_groups([[1], [-3]])
