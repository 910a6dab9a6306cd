"""Classes of prompts are kept apart by everything that compares prompts, and come back whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import (
    PromptClasses,
    TokenTable,
    choose_prefixes,
    make_requests,
    order_groups_by_subtree,
    sort_prompts,
)

BOUND = 3
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, BOUND - 1), min_size=1, max_size=5), st.integers(0, 2)),
    min_size=1,
    max_size=25,
)
CLASSES = PromptClasses(BOUND, 3)


@settings(deadline=None)
@given(PROMPTS)
@example([([2, 2, 2], 0), ([2, 2, 2], 2), ([2, 2, 2], 2)])
def test_prompts_come_back_with_their_classes(given: list[tuple[list[int], int]]) -> None:
    prompts, classes = zip(*given, strict=True)
    table = TokenTable.from_lists(prompts)
    marked = CLASSES.mark(table, np.array(classes))
    assert table.to_lists() == list(prompts)  # unchanged
    assert marked.lengths.tolist() == table.lengths.tolist()
    found, found_classes = CLASSES.unmark(marked)
    assert found.to_lists() == list(prompts)
    assert found_classes.tolist() == list(classes)


@settings(deadline=None)
@given(PROMPTS)
@example([([1, 1], 0), ([1, 1], 1), ([1, 1], 0), ([1, 2], 1)])
def test_groups_and_duplicates_are_of_one_class(given: list[tuple[list[int], int]]) -> None:
    prompts, classes = zip(*given, strict=True)
    marked = CLASSES.mark(TokenTable.from_lists(prompts), np.array(classes))
    requests, ranked = make_requests(
        marked, sort_prompts(marked), np.arange(len(prompts)), merge=True
    )
    assert len(requests) == len(set(zip(map(tuple, prompts), classes, strict=True)))
    tree = ranked.tree(requests.lengths)
    groups = choose_prefixes(tree).groups
    of_groups = CLASSES.of_groups(groups, requests)
    for group, (begin, end) in enumerate(
        zip(groups.offsets[:-1].tolist(), groups.offsets[1:].tolist(), strict=True)
    ):
        rows = requests.rows_of(groups.member_idxs[begin:end])
        assert {classes[row] for row in rows.tolist()} == {int(of_groups[group])}
    order = order_groups_by_subtree(groups, tree, np.ones(len(requests), dtype=np.int64))
    by_class = order[np.argsort(of_groups[order], kind="stable")]
    assert sorted(by_class.tolist()) == list(range(len(groups)))


def test_empty_prompts_and_empty_tables() -> None:
    empty = TokenTable.from_lists([])
    assert CLASSES.mark(empty, np.zeros(0, dtype=np.int64)).to_lists() == []
    marked = CLASSES.mark(TokenTable.from_lists([[], [1], []]), np.array([1, 2, 2]))
    assert marked.to_lists() == [[], [2 * BOUND + 1], []]


def test_classes_must_fit_beside_the_vocabulary() -> None:
    PromptClasses(1 << 17, 1 << 14)
    with pytest.raises(PlanError, match="at most 16384 can be planned"):
        PromptClasses(1 << 17, (1 << 14) + 1)
