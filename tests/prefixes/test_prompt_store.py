"""Prompts on disk and in memory: what is added comes back."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.spilling import file_size_limit

from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import PromptStore, TokenTable
from batchllm_operator.prefixes.prompt_store import chunks, read_ahead

TOKENS = st.integers(0, 2**31 - 1)
BATCHES = st.lists(st.lists(st.lists(TOKENS, max_size=5), max_size=5), max_size=5)


@given(BATCHES, st.data())
@example([[[1, 2]], [[], []], [[2**16], [3]]], None)
def test_a_store_equals_a_table(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[list[int]]],
    data: st.DataObject | None,
) -> None:
    everything = TokenTable.from_lists([prompt for batch in batches for prompt in batch])
    folder = tmp_path_factory.mktemp("store")
    with PromptStore(folder / "prompts") as store:
        for batch in batches:
            store.append(TokenTable.from_lists(batch))
        assert len(store) == len(everything)
        assert store.num_tokens == everything.num_tokens
        assert store.lengths.tolist() == everything.lengths.tolist()
        idxs = np.arange(len(everything))[::-1]
        if data is not None and len(everything):
            idxs = np.array(data.draw(st.lists(st.integers(0, len(everything) - 1))), np.int64)
        assert store.take(idxs).to_lists() == everything.take(idxs).to_lists()
        num_tokens = np.arange(len(idxs)) % 4
        begins = np.minimum(np.arange(len(idxs)) % 3, everything.lengths[idxs])
        taken = zip(store.take(idxs).to_lists(), begins, num_tokens, strict=True)
        expected = [prompt[begin : begin + n] for prompt, begin, n in taken]
        for prompts in (store, everything):
            assert prompts.slices(idxs, begins, num_tokens).to_lists() == expected
        assert [path.name for path in folder.iterdir()] == ["prompts"]


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        PromptStore(tmp_path / "prompts")
    assert (tmp_path / "prompts").read_bytes() == b"mine"


def test_a_file_that_is_cut_is_noticed(tmp_path: Path) -> None:
    with PromptStore(tmp_path / "prompts") as store:
        store.append(TokenTable.from_lists([[1, 2, 3], [4]]))
        os.truncate(tmp_path / "prompts", 8)
        assert store.slices(np.array([0]), 0, 2).to_lists() == [[1, 2]]
        with pytest.raises(OSError, match="shorter"):
            store.take(np.array([0, 1]))


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    with PromptStore(tmp_path / "prompts") as store, file_size_limit(1000):
        store.append(TokenTable.from_lists([[1] * 200]))
        with pytest.raises(OSError, match="File too large"):
            store.append(TokenTable.from_lists([[2] * 200]))
        store.append(TokenTable.from_lists([[3, 4]]))
        assert len(store) == 2
        assert store.take(np.array([1, 0])).to_lists() == [[3, 4], [1] * 200]


@given(st.lists(st.integers(0, 10), max_size=30), st.integers(1, 12))
def test_chunks_cover_all_and_are_bounded(num_tokens: list[int], most: int) -> None:
    found = list(chunks(np.array(num_tokens, dtype=np.int64), most))
    assert [idx for part in found for idx in range(part.start, part.stop)] == list(
        range(len(num_tokens))
    )
    for part in found:
        size = part.stop - part.start
        assert size == 1 or (sum(num_tokens[part]) <= most and size <= most)
    for one, following in pairwise(found):
        with_next = [*num_tokens[one], num_tokens[following.start]]
        assert sum(with_next) > most or len(with_next) > most


def test_reading_ahead_keeps_the_order_and_passes_errors_on(tmp_path: Path) -> None:
    prompts = TokenTable.from_lists([[n] * n for n in range(50)])
    wanted = [(np.array([n]), 0, n) for n in range(50)]
    assert [table.to_lists() for table in read_ahead(prompts, wanted)] == [
        [[n] * n] for n in range(50)
    ]
    with PromptStore(tmp_path / "prompts") as store:
        store.append(prompts)
        os.truncate(tmp_path / "prompts", 200)
        with pytest.raises(OSError, match="shorter"):
            list(read_ahead(store, wanted))


# In memory


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
