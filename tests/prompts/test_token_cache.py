"""What is kept of token ids stays within its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.prompts.token_cache import TokenCache

entries = st.lists(st.tuples(st.text(max_size=30), st.binary(max_size=300)))


@given(entries=entries, max_bytes=st.integers(0, 2000))
def test_memory_is_bounded_and_what_is_known_is_right(
    entries: list[tuple[str, bytes]], max_bytes: int
) -> None:
    cache = TokenCache(max_bytes)
    first: dict[str, bytes] = {}
    for text, token_ids in entries:
        if text not in cache.known:
            first[text] = token_ids
        cache.put(text, token_ids)
        assert cache.num_bytes <= max_bytes
        assert all(first[known] == ids for known, ids in cache.known.items())
    if not cache.known:
        assert cache.num_bytes == 0


def test_the_older_half_is_forgotten() -> None:
    cache = TokenCache(2000)
    for number in range(100):
        cache.put(f"word {number}", bytes(8))
        assert f"word {number}" in cache.known
    assert 3 < len(cache.known) < 12
    assert list(cache.known) == [f"word {100 - left}" for left in range(len(cache.known), 0, -1)]


def test_what_would_take_most_of_the_room_is_not_kept() -> None:
    cache = TokenCache(1000)
    cache.put("word", bytes(8))
    cache.put("long", bytes(800))
    assert list(cache.known) == ["word"]
