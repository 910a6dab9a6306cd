"""The out-of-core search gives the tree that the one in memory gives, whatever it may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.levels import examples

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import (
    Advance,
    PrefixSearch,
    PrefixTree,
    PromptStore,
    RankedPrompts,
    TokenTable,
    build_prefix_tree,
)
from batchllm_operator.prefixes.prompt_store import chunks
from batchllm_operator.prefixes.search import refine as refine_module
from batchllm_operator.prefixes.search.hash_rows import HashRows
from batchllm_operator.prefixes.search.segment_hashes import HASH_BITS, SegmentHasher


@st.composite
def layered_prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that go on from inside one another, so that they part inside of segments too."""
    prompts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 20))):
        base = draw(st.sampled_from(prompts))
        base = base[: draw(st.integers(0, len(base)))]
        prompts.append(base + draw(st.lists(st.integers(0, 2), max_size=9)))
    return draw(st.permutations(prompts))


def search(
    prompts: list[list[int]],
    folder: Path,
    *,
    segment_tokens: int,
    row_bytes: int | None,
    hash_bits: int = HASH_BITS,
    batch: int = 3,
) -> RankedPrompts:
    searched = PrefixSearch(row_bytes, segment_tokens=segment_tokens, hash_bits=hash_bits)
    with PromptStore(folder / "prompts") as store:
        for start in range(0, len(prompts), batch):
            tokens = TokenTable.from_lists(prompts[start : start + batch])
            store.append(tokens)
            searched.add(tokens)
        found = searched.finish(store)
    assert [path.name for path in folder.iterdir()] == ["prompts"]
    return found


def assert_equal(tree: PrefixTree, expected: PrefixTree) -> None:
    for name in ("prompt_idxs", "parent", "depth", "leaf_begin", "leaf_end"):
        assert getattr(tree, name).tolist() == getattr(expected, name).tolist(), name


@settings(max_examples=examples(300))
@given(
    layered_prompts(),
    st.integers(1, 6),
    st.none() | st.integers(1, 3000),
    st.sampled_from([9, HASH_BITS]),
    st.booleans(),
    st.integers(1, 3),
)
@example([], 4, None, HASH_BITS, False, 1)
@example([[]], 4, None, HASH_BITS, False, 1)
@example([[], [], []], 4, 1, HASH_BITS, True, 2)
@example([[7] * 9] * 5, 4, 1, HASH_BITS, True, 2)
@example([[1, 2, 3], [1, 2], [1], [], [1, 2]], 2, 1, HASH_BITS, True, 2)
@example([[2**31 - 1, 0], [2**31 - 1], [0]], 1, 1, HASH_BITS, True, 2)
def test_the_tree_is_that_of_prompts_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    segment_tokens: int,
    row_bytes: int | None,
    hash_bits: int,
    all_nodes_are_large: bool,
    first_tokens: int,
) -> None:
    tokens = TokenTable.from_lists(prompts)
    with pytest.MonkeyPatch.context() as patch:
        if all_nodes_are_large:
            patch.setattr(refine_module, "_LARGE_RANKS", 1)
        patch.setattr(refine_module, "_FLUSH_TOKENS", 20)
        patch.setattr(refine_module, "_FIRST_TOKENS", first_tokens)
        ranked = search(
            prompts,
            tmp_path_factory.mktemp("search"),
            segment_tokens=segment_tokens,
            row_bytes=row_bytes,
            hash_bits=hash_bits,
        )
    assert_equal(ranked.tree(tokens.lengths), build_prefix_tree(tokens))
    order = ranked.prompt_idxs.tolist()
    repeats = [
        rank > 0 and prompts[order[rank - 1]] == prompts[idx] for rank, idx in enumerate(order)
    ]
    assert ranked.is_repeat.tolist() == repeats


def test_wide_and_deep_trees_with_the_usual_segments(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    instruction = generator.integers(0, 100, 70).tolist()
    prompts = []
    for _ in range(300):
        document = instruction + generator.integers(0, 100, generator.integers(0, 300)).tolist()
        for _ in range(generator.integers(1, 5)):
            prompts.append(document + generator.integers(0, 3, generator.integers(0, 90)).tolist())
    prompts += [prompts[5], prompts[5], instruction, instruction[:64], instruction[:10]]
    tokens = TokenTable.from_lists(prompts)
    ranked = search(prompts, tmp_path, segment_tokens=64, row_bytes=20_000, batch=50)
    assert_equal(ranked.tree(tokens.lengths), build_prefix_tree(tokens))


def test_a_collision_is_noticed_and_other_hashes_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hash says that all segments are equal; only tokens can tell."""
    rows = SegmentHasher.rows
    seeds: list[int] = []

    class Forgetful(SegmentHasher):
        def __init__(self, seed: int = 0, **options: int) -> None:
            seeds.append(seed)
            super().__init__(seed, **options)

        def rows(self, tokens: TokenTable) -> TokenTable:
            found = rows(self, tokens)
            if seeds[-1] > 0:
                return found
            return TokenTable(np.zeros_like(found.token_ids), found.offsets)

    monkeypatch.setattr("batchllm_operator.prefixes.search.prefix_search.SegmentHasher", Forgetful)
    prompts = [[1] * 10, [2] * 10, [1] * 10, [3] * 4]
    found = search(prompts, tmp_path, segment_tokens=4, row_bytes=1)
    assert seeds == [0, 1]
    assert found.prompt_idxs.tolist() == [0, 2, 1, 3]
    assert found.num_shared_tokens.tolist() == [0, 10, 0, 0]


def test_a_collision_that_is_noticed_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows of many prompts are there by then, since all prompts part at the root."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 2**31, 5).tolist() for _ in range(9000)]
    monkeypatch.setattr(chunks, "__defaults__", (2000,))
    found = search(prompts, tmp_path, segment_tokens=4, row_bytes=None, hash_bits=24)
    tree = build_prefix_tree(TokenTable.from_lists(prompts))
    assert found.prompt_idxs.tolist() == tree.prompt_idxs.tolist()


def test_rows_keep_within_their_bytes() -> None:
    """Segments get longer, up to one for all of a prompt."""
    generator = np.random.default_rng(0)
    tokens = TokenTable.from_lists(generator.integers(0, 9, (60, 700), dtype=np.int32))
    for row_bytes, segment_tokens in ((60 * 11 * 8, 64), (60 * 11 * 8 - 1, 128), (60 * 8, 1024)):
        rows = HashRows(SegmentHasher(segment_tokens=64), row_bytes)
        for idx in range(60):
            rows.add(tokens.take([idx]))
        assert rows.segment_tokens == segment_tokens
        assert sorted(rows.sort(tokens.lengths).prompt_idxs.tolist()) == list(range(60))


@given(layered_prompts(), st.integers(0, 3))
def test_coarse_rows_are_those_of_longer_segments(prompts: list[list[int]], times: int) -> None:
    """Where hashes of short segments say that prompts share, so do those of long ones."""
    tokens = TokenTable.from_lists(prompts)
    rows = HashRows(SegmentHasher(segment_tokens=2), None)
    rows.add(tokens)
    for _ in range(times):
        rows._halve()
    coarse = HashRows(SegmentHasher(segment_tokens=2 << times), None)
    coarse.add(tokens)
    assert rows.segment_tokens == coarse.segment_tokens
    for found in (rows, coarse):
        ranked = found.sort(tokens.lengths)
        idxs, shared = ranked.prompt_idxs.tolist(), ranked.num_shared_tokens.tolist()
        for rank in range(1, len(prompts)):
            before, prompt = prompts[idxs[rank - 1]], prompts[idxs[rank]]
            whole = next(
                n
                for n in range(min(len(before), len(prompt)) // (2 << times), -1, -1)
                if before[: n * (2 << times)] == prompt[: n * (2 << times)]
            )
            assert shared[rank] == whole * (2 << times)
            assert bool(ranked.is_repeat[rank]) == (before == prompt)


def test_progress_is_told_of_every_prompt() -> None:
    told: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(name: str, total: int) -> Iterator[Advance]:
        done: list[int] = []
        yield done.append
        told.append((name, total, sum(done)))

    tokens = TokenTable.from_lists([[n % 7, n] for n in range(50)])
    searched = PrefixSearch()
    searched.add(tokens)
    searched.finish(tokens, phase)
    assert told == [("sort", 50, 50), ("compare", 50, 50)]


@settings(deadline=None)
@given(layered_prompts(), st.integers(1, 5))
def test_blocks_share_what_is_whole(prompts: list[list[int]], block_size: int) -> None:
    tokens = TokenTable.from_lists(prompts)
    searched = PrefixSearch(segment_tokens=3)
    searched.add(tokens)
    ranked = searched.finish(tokens)
    blocks = ranked.in_blocks(block_size)
    assert blocks.prompt_idxs.tolist() == ranked.prompt_idxs.tolist()
    assert blocks.num_shared_tokens.tolist() == [
        n - n % block_size for n in ranked.num_shared_tokens.tolist()
    ]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="segments"):
        PrefixSearch(segment_tokens=0)
    with pytest.raises(PlanError, match="bits"):
        PrefixSearch(hash_bits=63)
