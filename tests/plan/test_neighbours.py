"""Steps of a stream beside each other: the same results and errors as one after the other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from batchllm_operator.plan.neighbours import OneBehind, one_ahead, side_by_side

WAIT_S = 30  # for another thread that has nothing else to do


def test_items_come_in_their_order() -> None:
    with one_ahead(iter(range(100))) as items:
        assert list(items) == list(range(100))
    with one_ahead(iter(())) as nothing:
        assert list(nothing) == []


def test_the_next_item_is_made_while_the_caller_has_one_and_no_other() -> None:
    made: list[int] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    with one_ahead(items()) as ahead:
        assert next(ahead) == 0
        assert second.wait(WAIT_S)
        assert made == [0, 1]


def test_what_making_an_item_raises_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    with one_ahead(items()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)


def test_a_generator_that_is_left_is_closed() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.set()

    with pytest.raises(ZeroDivisionError), one_ahead(items()) as ahead:
        next(ahead)
        raise ZeroDivisionError
    assert closed.is_set()


def test_calls_run_in_their_order_one_behind_the_caller() -> None:
    done: list[int] = []
    go_on = threading.Event()

    def wait() -> None:
        assert go_on.wait(WAIT_S)
        done.append(0)

    with OneBehind() as behind:
        behind.run(wait)  # doesn't wait for it
        assert done == []
        go_on.set()
        for number in range(1, 50):
            behind.run(done.append, number)
            assert done == list(range(number)) or done == list(range(number + 1))
    assert done == list(range(50))


def test_what_a_call_raises_comes_with_the_next_one_or_at_the_end() -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"), OneBehind() as behind:
        behind.run(fail)
    with OneBehind() as behind:
        behind.run(fail)
        with pytest.raises(OSError, match="the disk is full"):
            behind.run(fail)
        behind.run(int)  # what failed is known; the second one was never begun
    with pytest.raises(ZeroDivisionError), OneBehind() as behind:
        behind.run(fail)
        raise ZeroDivisionError


def test_two_calls_run_side_by_side_and_give_their_results_in_order() -> None:
    both_run, done = threading.Barrier(2), []

    def call(idx: int, advance: Callable[[int], None]) -> int:
        if idx < 2:
            both_run.wait(WAIT_S)
        advance(1)
        return idx * idx

    assert side_by_side(call, 5, done.append) == [0, 1, 4, 9, 16]
    assert done == [1] * 5
    assert side_by_side(call, 0, done.append) == []


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_call_that_fails_ends_the_one_beside_it_and_all_that_follow(faulty: int) -> None:
    begun: list[int] = []
    both_run = threading.Barrier(2)

    def call(idx: int, advance: Callable[[int], None]) -> None:
        begun.append(idx)
        both_run.wait(WAIT_S)
        if idx == faulty:
            raise OSError("the disk is full")
        while True:
            advance(1)

    with pytest.raises(OSError, match="the disk is full"):
        side_by_side(call, 10, lambda _: None)
    assert sorted(begun) == [0, 1]


def test_an_interruption_ends_both() -> None:
    both_run = threading.Barrier(2)
    ended = threading.Semaphore(0)
    interrupted: list[int] = []

    def call(idx: int, advance: Callable[[int], None]) -> None:
        both_run.wait(WAIT_S)
        try:
            while True:
                advance(idx)
        finally:
            ended.release()

    def interrupt(idx: int) -> None:
        if not interrupted:
            interrupted.append(idx)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # A shell's background job ignores SIGINT, and so do the tests that it starts.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side(call, 10, interrupt)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert all(ended.acquire(timeout=WAIT_S) for _ in range(2))
