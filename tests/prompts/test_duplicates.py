"""Exact duplicates, against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from batchllm_operator.planner import TokenTable
from batchllm_operator.prompts import first_occurrences


@given(st.lists(st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=4), max_size=30))
@example([])
@example([[]])
@example([[], [], [0]])
@example([[0], [0, 0], [0, 0, 0], [0]])
def test_each_prompt_points_at_the_first_with_the_same_tokens(prompts: list[list[int]]) -> None:
    first: dict[tuple[int, ...], int] = {}
    expected = [first.setdefault(tuple(prompt), idx) for idx, prompt in enumerate(prompts)]
    found = first_occurrences(TokenTable.from_lists(prompts))
    assert found.tolist() == expected
    assert found.dtype == np.int64


def test_prompts_that_differ_in_one_token_are_kept_apart() -> None:
    base = np.arange(1000, dtype=np.int32)
    prompts = [base.copy() for _ in range(300)]
    for idx, prompt in enumerate(prompts):
        prompt[idx] += 1
    found = first_occurrences(TokenTable.from_lists([*prompts, prompts[7]]))
    assert found.tolist() == [*range(300), 7]
