"""Requests stand for the rows with their prompt; classes of prompts are kept apart."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import (
    PromptClasses,
    TokenTable,
    build_prefix_tree,
    choose_prefixes,
    make_requests,
    optimal_saving_ratio,
    order_groups_by_subtree,
    sort_prompts,
)

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=20)


@settings(deadline=None)
@given(PROMPTS, st.lists(st.booleans(), min_size=1, max_size=3), st.booleans())
@example([], [True], True)
@example([[1], [0], [1], [1], []], [True], True)
@example([[1], [1], [1], [1], [1, 0], []], [True, True], True)
@example([[1], [1], [1], [1], [1], [1]], [False, True, True], True)
def test_every_row_is_in_the_request_of_its_prompt(
    prompts: list[list[int]], merge: list[bool], with_estimates: bool
) -> None:
    """With several questions, in that of its question."""
    tokens = TokenTable.from_lists(prompts)
    step = 3 if len(merge) == 2 else 2
    row_idxs = np.arange(len(prompts)) * step + 1
    estimates = np.arange(len(prompts)) % 5 if with_estimates else None
    requests, ranked = make_requests(tokens, sort_prompts(tokens), row_idxs, estimates, merge=merge)
    expected: dict[object, list[int]] = {}
    for idx, prompt in enumerate(prompts):
        question = (step * idx + 1) % len(merge)
        same = (question, *prompt) if merge[question] else idx
        expected.setdefault(same, []).append(idx)
    assert len(requests) == len(expected)
    everyone = np.arange(len(requests))
    assert requests.num_rows.tolist() == [len(members) for members in expected.values()]
    assert requests.rows_of(everyone).tolist() == [
        step * idx + 1 for members in expected.values() for idx in members
    ]
    firsts = [members[0] for members in expected.values()]
    planned = requests.prompts.slices(requests.prompt_idxs, 0, requests.lengths)
    assert planned.to_lists() == [prompts[idx] for idx in firsts]
    assert requests.lengths.tolist() == [len(prompts[idx]) for idx in firsts]
    if with_estimates:
        assert requests.output_tokens is not None
        assert requests.output_tokens.tolist() == [
            max(idx % 5 for idx in members) for members in expected.values()
        ]
    asked = [(step * members[0] + 1) % len(merge) for members in expected.values()]
    assert requests.questions(len(merge)).tolist() == asked
    tree = ranked.tree(requests.lengths)
    alone = build_prefix_tree(TokenTable.from_lists([prompts[idx] for idx in firsts]))
    assert tree.prompt_idxs.tolist() == alone.prompt_idxs.tolist()
    assert tree.depth.tolist() == alone.depth.tolist()


def test_rows_of_some_requests() -> None:
    tokens = TokenTable.from_lists([[1], [2], [1], [3], [2], [1]])
    requests, _ = make_requests(tokens, sort_prompts(tokens), np.arange(6), merge=[True])
    assert requests.rows_of(np.array([2, 0])).tolist() == [3, 0, 2, 5]
    assert requests.rows_of(np.zeros(0, dtype=np.int64)).tolist() == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12))
def test_equal_prompts_are_computed_once_if_their_outputs_are_equal(
    prompts: list[list[int]],
) -> None:
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    num_saved = sum(map(len, prompts)) - sum(map(len, distinct))
    merged = optimal_saving_ratio(TokenTable.from_lists(prompts), 1, merge=[True])
    once = optimal_saving_ratio(TokenTable.from_lists(distinct), 1, merge=[False])
    assert merged * sum(map(len, prompts)) == pytest.approx(
        num_saved + once * sum(map(len, distinct))
    )


def test_prompts_whose_outputs_differ_are_computed_each() -> None:
    tokens = TokenTable.from_lists([[1, 2], [1, 2], [1, 3]])
    assert optimal_saving_ratio(tokens, 1, merge=[False]) == pytest.approx(1 / 3)
    assert optimal_saving_ratio(tokens, 1, merge=[True]) == 0.5
    assert optimal_saving_ratio(tokens, 2, merge=[False]) == 0
    assert optimal_saving_ratio(TokenTable.from_lists([]), 2, merge=[False]) == 0


# Classes


BOUND = 3
CLASSED = st.lists(
    st.tuples(st.lists(st.integers(0, BOUND - 1), min_size=1, max_size=5), st.integers(0, 2)),
    min_size=1,
    max_size=25,
)
CLASSES = PromptClasses(BOUND, 3)


@settings(deadline=None)
@given(CLASSED)
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
@given(CLASSED)
@example([([1, 1], 0), ([1, 1], 1), ([1, 1], 0), ([1, 2], 1)])
def test_groups_and_duplicates_are_of_one_class(given: list[tuple[list[int], int]]) -> None:
    prompts, classes = zip(*given, strict=True)
    marked = CLASSES.mark(TokenTable.from_lists(prompts), np.array(classes))
    requests, ranked = make_requests(
        marked, sort_prompts(marked), np.arange(len(prompts)), merge=[True]
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


@given(PROMPTS.filter(bool), st.data())
def test_some_prompts_are_ranked_as_if_there_were_no_others(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    tokens = TokenTable.from_lists(prompts)
    chosen = data.draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, unique=True))
    is_chosen = np.zeros(len(prompts), dtype=np.bool_)
    is_chosen[chosen] = True
    found = sort_prompts(tokens).only(is_chosen)
    alone = sort_prompts(tokens.take(sorted(chosen)))
    assert found.prompt_idxs.tolist() == [sorted(chosen)[idx] for idx in alone.prompt_idxs]
    assert found.num_shared_tokens.tolist() == alone.num_shared_tokens.tolist()
