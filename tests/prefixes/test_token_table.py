"""TokenTable: what it takes and gives back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import TokenTable

PROMPTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)


@given(PROMPTS)
def test_from_lists_keeps_every_token(prompts: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(prompts)
    assert [tokens.prompt(idx).tolist() for idx in range(len(tokens))] == prompts
    assert tokens.lengths.tolist() == [len(prompt) for prompt in prompts]
    assert tokens.num_tokens == sum(len(prompt) for prompt in prompts)


@settings(deadline=None)
@given(PROMPTS.filter(bool), st.data())
def test_take_reorders_and_repeats(prompts: list[list[int]], data: st.DataObject) -> None:
    idxs = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=10))
    taken = TokenTable.from_lists(prompts).take(idxs)
    assert [taken.prompt(i).tolist() for i in range(len(taken))] == [prompts[i] for i in idxs]


def test_prompt_is_a_view() -> None:
    tokens = TokenTable.from_lists([[1, 2], [3]])
    assert np.shares_memory(tokens.prompt(1), tokens.token_ids)


def test_from_lists_takes_arrays_of_any_integer_type() -> None:
    tokens = TokenTable.from_lists([np.array([1, 2], dtype=np.uint16), np.array([], dtype=float)])
    assert tokens.token_ids.tolist() == [1, 2]
    assert tokens.token_ids.dtype == np.int32
    assert tokens.lengths.tolist() == [2, 0]


@pytest.mark.parametrize("token_id", [2**31, 2**63, 2**70])
def test_ids_of_more_than_31_bits_are_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        TokenTable.from_lists([[0], [token_id]])


def test_negative_ids_are_refused() -> None:
    with pytest.raises(PlanError, match="-3"):
        TokenTable.from_lists([[0], [-3]])
