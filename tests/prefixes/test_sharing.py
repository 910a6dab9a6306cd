"""What a plan says of how prefixes are shared."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchllm_operator.prefixes import (
    PlanSharing,
    TokenTable,
    TreeNode,
    build_prefix_tree,
    describe_sharing,
    largest_nodes,
    sharing,
)
from batchllm_operator.prefixes.algorithm1 import PrefixGroups
from batchllm_operator.prefixes.requests import Requests
from batchllm_operator.prefixes.sharing import Histogram, _first_words

SIZES = st.lists(st.integers(1, 2**52), max_size=50)


def describe(texts: Sequence[str], groups: Sequence[tuple[int, int]]) -> PlanSharing:
    """Of prompts with a token for each character, in groups of (size, prefix tokens)."""
    tokens = TokenTable.from_lists([[ord(c) for c in text] for text in texts])
    idxs = np.arange(len(tokens.lengths) + 1)
    requests = Requests(tokens, idxs[:-1], tokens.lengths, idxs[:-1], idxs)
    sizes = np.array([size for size, _ in groups], dtype=np.int64)
    found = PrefixGroups(
        idxs[:-1],
        np.append(0, np.cumsum(sizes)),
        np.array([length for _, length in groups], dtype=np.int64),
    )
    return describe_sharing(requests, found, lambda ids: "".join(map(chr, ids)))


@given(SIZES, st.booleans())
def test_each_size_is_counted_in_its_bin(sizes: list[int], weighted: bool) -> None:
    weights = np.arange(len(sizes), dtype=np.int64) if weighted else None
    found = Histogram.of(np.array(sizes, dtype=np.int64), weights)
    expected = [
        sum(
            int(weights[i]) if weights is not None else 1
            for i, size in enumerate(sizes)
            if low <= size < high
        )
        for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert list(found.counts) == expected
    assert sum(found.counts) == (sum(range(len(sizes))) if weighted else len(sizes))


def test_powers_of_two_begin_bins() -> None:
    found = Histogram.of(np.array([1, 2, 3, 4, 7, 8]))
    assert found == Histogram(edges=(1, 2, 4, 8, 16), counts=(1, 2, 2, 1))


@pytest.mark.parametrize(
    ("edges", "counts"), [((1, 2), ()), ((1,), ()), ((), (1,)), ((1, 2), (-1,))]
)
def test_a_histogram_fits_together(edges: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        Histogram(edges=edges, counts=counts)


def test_distributions_and_the_groups_that_save_most() -> None:
    texts = ["Say: dogs bark1", "Say: dogs bark2", "Say: dogs bark3"]
    texts += ["Say: cats purr1", "Say: cats purr2", "alone"]
    found = describe(texts, [(3, 14), (2, 14), (1, 0)])
    assert found.prefix_lengths == Histogram(edges=(8, 16), counts=(2,))
    assert found.share_degrees == Histogram(edges=(1, 2, 4), counts=(1, 5))
    first, second = found.largest_groups
    assert (first.num_requests, first.num_prefix_tokens, first.num_saved_tokens) == (3, 14, 28)
    assert first.first_words == "… dogs bark"
    assert (second.num_saved_tokens, second.first_words) == (14, "… cats purr")


def test_ten_groups_are_shown_in_a_stable_order() -> None:
    texts = [f"{letter}{member}" for letter in "abcdefghijklm" for member in "12"]
    found = describe(texts, [(2, 1)] * 13)
    assert [group.first_words for group in found.largest_groups] == list("abcdefghij")


def test_words_of_one_group_are_shown_whole_and_clipped() -> None:
    text = "a\tb\x1b[2J\n" + "word " * 50
    (group,) = describe([text + "1", text + "2"], [(2, len(text))]).largest_groups
    assert group.first_words.startswith("a b [2J word word")
    assert len(group.first_words) <= 160
    assert group.first_words.isprintable()


def test_a_prefix_that_all_begin_with_is_not_hidden() -> None:
    """One of the groups has nothing but what all begin with."""
    found = describe(["abX", "abY", "abcd1", "abcd2"], [(2, 2), (2, 4)])
    assert [group.first_words for group in found.largest_groups] == ["abcd", "ab"]


def test_half_a_surrogate_pair_can_be_stored() -> None:
    found = describe(["\ud800a1", "\ud800a2"], [(2, 2)])
    assert found.largest_groups[0].first_words == "a"
    assert PlanSharing.model_validate_json(found.model_dump_json()) == found


def test_nothing_shared() -> None:
    found = describe(["a", "b"], [(1, 0), (1, 0)])
    assert found.prefix_lengths == Histogram(edges=(), counts=())
    assert found.share_degrees == Histogram(edges=(1, 2), counts=(2,))
    assert found.largest_groups == ()
    assert describe([], []).share_degrees == Histogram(edges=(), counts=())


def test_halves_of_characters_at_the_ends_arent_shown() -> None:
    text = "\ufffd\ufffd The rose \ufffd is red \ufffd"
    assert _first_words(np.arange(3), 0, lambda _: text) == "The rose \ufffd is red"


def tree_of(prompts: Sequence[Sequence[int]]) -> tuple[TreeNode, ...]:
    tokens = TokenTable.from_lists(prompts)
    return largest_nodes(build_prefix_tree(tokens))


def counted_nodes(prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """How many prompts begin with each prefix that several have, but for its longest extension."""
    begun = Counter(p[:end] for p in prompts for end in range(1, len(p) + 1))
    return {p: n for p, n in begun.items() if n > 1}


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=30))
def test_the_nodes_of_the_tree_have_all_that_is_shared(prompts: list[list[int]]) -> None:
    tree = tree_of(prompts)
    shared = counted_nodes([tuple(prompt) for prompt in prompts])
    saved = sum(number - 1 for number in shared.values())
    if not saved:
        assert tree == ()
        return
    assert (tree[0].num_saved_tokens, tree[0].num_requests) == (saved, len(prompts))
    assert sum(node.num_own_saved_tokens for node in tree) == saved
    assert Counter(node.num_requests for node in tree[1:] for _ in range(node.num_tokens)) == (
        Counter(shared.values())
    )
    PlanSharing.model_validate_json(
        sharing.merged(
            [describe(["a"], [(1, 0)]).model_copy(update={"tree": tree})] * 2
        ).model_dump_json()
    )


def test_the_nodes_that_save_most_are_kept_with_those_above_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [[1, 1, 1, x] for x in range(5)] + [[1, 2, x, y] for x in range(2) for y in range(2)]
    whole = tree_of(prompts)
    assert [(node.level, node.num_requests, node.num_tokens) for node in whole] == [
        (0, 9, 0),
        (1, 9, 1),
        (2, 5, 2),
        (2, 4, 1),
        (3, 2, 1),
        (3, 2, 1),
    ]
    assert [node.num_saved_tokens for node in whole] == [21, 21, 8, 5, 1, 1]
    monkeypatch.setattr(sharing, "_NUM_NODES", 4)
    assert tree_of(prompts) == whole[:4]
    both = sharing.merged([describe(["a"], [(1, 0)]).model_copy(update={"tree": whole})] * 2).tree
    assert [(node.level, node.num_saved_tokens) for node in both] == [
        *((0, 42), (1, 21), (2, 8), (1, 21))
    ]


@pytest.mark.parametrize("levels", [[1], [0, 0], [0, 2], [0, 1, 0]])
def test_nodes_of_a_tree_follow_the_one_above(levels: list[int]) -> None:
    nodes = [
        {"level": level, "num_requests": 2, "num_tokens": 1, "num_saved_tokens": 1}
        for level in levels
    ]
    stored = describe(["a"], [(1, 0)]).model_dump() | {"tree": nodes}
    with pytest.raises(ValidationError, match="follow"):
        PlanSharing.model_validate(stored)
