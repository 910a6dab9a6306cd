"""Ranges: each prompt is in one, and boundaries cut what neighbours share least."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.prefixes import TokenTable
from batchllm_operator.spark.ranges import (
    Place,
    Ranges,
    choose_ranges,
    key_array,
    num_ranges,
    tokens_of,
)

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=6)
samples = st.lists(prompts, min_size=1, max_size=40)


def keys_of(tokens: TokenTable) -> list[bytes]:
    keys: list[bytes] = key_array(tokens).to_pylist()
    return keys


def places_of(rows: list[list[int]]) -> list[Place]:
    return sorted((key, place) for place, key in enumerate(keys_of(TokenTable.from_lists(rows))))


@given(samples, st.integers(1, 6), st.data())
def test_a_prompt_is_in_the_range_of_its_key_and_place(
    rows: list[list[int]], num: int, data: st.DataObject
) -> None:
    """Also if only the beginning of the key is looked at."""
    ranges = choose_ranges(places_of(rows), num, None)
    drawn = data.draw(st.lists(prompts, min_size=1, max_size=20))
    tokens = TokenTable.from_lists(drawn + rows)
    places = np.arange(len(tokens)) % 7
    found = ranges.numbers(key_array(tokens), places)
    pairs = list(zip(keys_of(tokens), places.tolist(), strict=True))
    assert found == [sum(bound <= pair for bound in ranges.boundaries) for pair in pairs]
    assert all(0 <= number < len(ranges) for number in found)
    heads = ranges.heads(key_array(tokens), found).to_pylist()
    by_head = sorted(zip(found, heads, pairs, strict=True))
    assert [pair for _, _, pair in by_head] == sorted(pairs)


@given(samples)
def test_keys_are_big_endian_tokens(rows: list[list[int]]) -> None:
    tokens = TokenTable.from_lists(rows)
    keys = key_array(tokens)
    assert keys.to_pylist() == keys_of(tokens)
    whole = pa.concat_arrays([keys.cast(pa.large_binary())])
    offsets = np.frombuffer(whole.buffers()[1], dtype=np.int64)[: len(rows) + 1]
    back = tokens_of(np.frombuffer(whole.buffers()[2], dtype=np.uint8), offsets)
    assert back.to_lists() == rows
    assert sorted(keys.to_pylist()) == keys_of(TokenTable.from_lists(sorted(rows)))


@given(samples, st.integers(1, 6), st.integers(1, 9))
def test_shards_are_given_to_ranges(rows: list[list[int]], num: int, num_shards: int) -> None:
    ranges = choose_ranges(places_of(rows), num, num_shards)
    assert sum(each or 0 for each in ranges.num_shards) == num_shards
    assert all(ranges.num_shards)
    assert list(ranges.boundaries) == sorted(set(ranges.boundaries))


def test_a_boundary_ends_with_the_first_token_that_differs() -> None:
    documents = [[document] * 5 + [query] for document in range(8) for query in range(5)]
    ranges = choose_ranges(places_of(documents), 4, None)
    assert len(ranges) == 4
    for key, place in ranges.boundaries:
        assert (len(key), place) == (4, -1)


def test_equal_prompts_are_cut_by_place() -> None:
    ranges = choose_ranges(places_of([[1, 2, 3]] * 40), 4, None)
    assert len(ranges) == 4
    (key,) = keys_of(TokenTable.from_lists([[1, 2, 3]]))
    assert {bound for bound, _ in ranges.boundaries} == {key}
    assert Ranges((), (None,)).of(key, 3) == 0


def test_heads_begin_where_keys_of_a_range_differ() -> None:
    lower, prompt, far, upper = keys_of(TokenTable.from_lists([[7, 1], [7, 2, 9], [7, 3], [7, 4]]))
    ranges = Ranges(((lower, -1), (upper, -1)), (None, None, None))
    keys = pa.array([prompt, far, upper, prompt + far * 20], pa.binary())
    heads = ranges.heads(keys, [1, 1, 2, 1]).to_pylist()
    assert heads == [prompt[4:], far[4:], upper, (prompt + far * 20)[4:68]]


def test_ranges_are_about_128_mib() -> None:
    sample = places_of([[1] * 1000] * 10)
    assert num_ranges(0, []) == 1
    assert num_ranges(10, sample) == 1
    assert num_ranges(1_000_000, sample) == 30
    assert num_ranges(10**10, sample) == 10_000
