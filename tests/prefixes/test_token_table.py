"""TokenTable: what it accepts, refuses and gives back."""

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


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**31],
        [2**63],
        [2**70],
        [-1, 2**63],
        [1.0],
        [True],
        ["1"],
        [None],
        [[1]],
        [[1], [1, 2]],
        7,
    ],
)
def test_from_lists_refuses_and_names_the_prompt(bad: object) -> None:
    with pytest.raises(PlanError, match=r"prompt 2\b"):
        TokenTable.from_lists([[0], [2**31 - 1], bad])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("token_ids", "offsets"),
    [
        (np.zeros(3, np.int64), np.array([0, 3])),
        (np.zeros(3, np.int32), np.array([0, 3], np.int32)),
        (np.zeros((3, 1), np.int32), np.array([0, 3])),
        (np.zeros(6, np.int32)[::2], np.array([0, 3])),
        (np.zeros(3, np.int32), np.array([], np.int64)),
        (np.zeros(3, np.int32), np.array([1, 3])),
        (np.zeros(3, np.int32), np.array([0, 2])),
        (np.zeros(3, np.int32), np.array([0, 2, 1, 3])),
    ],
)
def test_construction_refuses(token_ids: np.ndarray, offsets: np.ndarray) -> None:
    with pytest.raises(PlanError):
        TokenTable(token_ids, offsets)


def test_construction_names_the_prompt_with_a_negative_token() -> None:
    with pytest.raises(PlanError, match=r"prompt 2\b"):
        TokenTable(np.array([5, 6, -7], np.int32), np.array([0, 2, 2, 3]))
