"""Streams: results and errors as one after the other, a bounded number of items ahead."""

import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.demo_job import wait_until

from batchllm_operator.streams import ahead, batches_of, one_ahead


def noted(items: Iterable[int], made: list[int]) -> Iterator[int]:
    """The items, each in the list once it is asked for."""
    for item in items:
        made.append(item)
        yield item


def test_results_come_in_order_and_a_few_ahead() -> None:
    asked: list[int] = []
    results = ahead(noted(range(20), asked), lambda number: number * 2, num_threads=3)
    assert next(results) == 0
    assert asked == [0, 1, 2, 3]
    assert list(results) == [number * 2 for number in range(1, 20)]


def test_a_failure_comes_in_its_turn_and_ends_the_others() -> None:
    done: list[int] = []

    def work(number: int) -> int:
        if number == 2:
            raise OSError("gone")
        done.append(number)
        return number

    results = ahead(range(100), work, num_threads=1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(results)
    assert max(done) <= 4


def test_a_caller_that_stops_early_leaves_no_thread() -> None:
    results = ahead(range(100), str, num_threads=2)
    assert next(results) == "0"
    results.close()
    assert not [thread for thread in threading.enumerate() if "batchllm-ahead" in thread.name]


def test_an_item_is_made_while_the_caller_has_the_one_before_and_no_other() -> None:
    made: list[int] = []
    with one_ahead(noted(range(5), made)) as following:
        assert next(following) == 0
        wait_until(lambda: len(made) == 2, "the second is made")
        assert made == [0, 1]
        assert list(following) == [1, 2, 3, 4]
    with one_ahead(iter(())) as nothing:
        assert list(nothing) == []


def test_a_generator_that_is_left_is_closed_and_one_that_fails_raises_in_its_turn() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield 1
            raise OSError("the disk is gone")
        finally:
            closed.set()

    with one_ahead(items()) as following:
        assert next(following) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(following)
    closed.clear()
    with pytest.raises(ZeroDivisionError), one_ahead(items()) as following:
        next(following)
        raise ZeroDivisionError
    assert closed.is_set()


@given(st.lists(st.integers(0, 9)), st.integers(0, 20), st.integers(1, 4))
def test_batches_are_as_long_as_limits_allow(sizes: list[int], most: int, most_items: int) -> None:
    batches = list(batches_of(sizes, (most, int), (most_items, lambda _: 1)))
    assert [size for batch in batches for size in batch] == sizes
    assert all(
        len(batch) == 1 or (sum(batch) <= most and len(batch) <= most_items) for batch in batches
    )
    for batch, following in pairwise(batches):
        assert sum(batch) + following[0] > most or len(batch) == most_items
