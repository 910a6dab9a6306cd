"""Work on many files at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from batchllm_operator.storage import ahead


def test_results_come_in_order_and_a_few_ahead() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            asked.append(number)
            yield number

    results = ahead(items(), lambda number: number * 2, num_threads=3)
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


def test_whoever_stops_early_leaves_no_thread() -> None:
    results = ahead(range(100), str, num_threads=2)
    assert next(results) == "0"
    results.close()
    assert not [each for each in threading.enumerate() if "batchllm-ahead" in each.name]
