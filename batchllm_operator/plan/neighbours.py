"""Runs the steps of a stream side by side, in order: one item ahead, and one behind.

    read  batch 3       | thread of `one_ahead`
    work  batch 2       | the caller
    keep  batch 1       | thread of `OneBehind`

Shards, which don't depend on each other, are written two at a time (`side_by_side`).

Their work (decoding, compressing, writing, compiled loops) releases Python's lock. Each thread has
one item at a time, so memory holds three, independent of the number of cores, and the result
doesn't depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

_AT_ONCE: Final = 2
"""Calls of `side_by_side` at a time, on any machine: each holds parts of a shard in memory."""

T = TypeVar("T")
P = ParamSpec("P")


@contextmanager
def one_ahead(items: Iterator[T]) -> Generator[Iterator[T]]:
    """Iterate over `items`, with the next one made in a thread while the caller has this one.

    An error in making an item is raised in its place. A generator is closed at the end, after its
    current item.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:

        def ahead() -> Iterator[T]:
            nothing: Any = object()
            following: Future[Any] = thread.submit(next, items, nothing)
            while (item := following.result()) is not nothing:
                following = thread.submit(next, items, nothing)
                yield item
                del item

        try:
            yield ahead()
        finally:
            if isinstance(items, Generator):
                thread.submit(items.close).result()


class OneBehind:
    """Runs calls in a thread, in order, one at a time while the caller goes on.

    The end of its context waits for the last call.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._last: Future[Any] | None = None

    def __enter__(self) -> OneBehind:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self._wait()

    def run(self, call: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
        """Wait for the previous call, and begin this one.

        Raises:
            Exception: what the previous call has raised.
        """
        self._wait()
        self._last = self._thread.submit(call, *args, **options)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


def side_by_side(
    call: Callable[[int, Callable[[int], None]], T], count: int, advance: Callable[[int], None]
) -> list[T]:
    """Run `call(0, advance)`, `call(1, advance)`, ..., two at a time; returns their results.

    Calls report progress by `advance`, which is never called concurrently. If one fails, or this is
    interrupted, the others end at their next `advance`, or before they begin.

    Raises:
        Exception: that of the first failed call.
    """
    one_at_a_time = Lock()
    failures: list[BaseException] = []

    def advance_unless_over(done: int) -> None:
        if failures:
            raise CancelledError
        with one_at_a_time:
            advance(done)

    def run(idx: int) -> T:
        try:
            if failures:
                raise CancelledError
            return call(idx, advance_unless_over)
        except BaseException as error:
            failures.append(error)
            raise

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="side-by-side") as threads:
        try:
            results = [threads.submit(run, idx) for idx in range(count)]
            wait(results)
        except BaseException as interruption:
            failures.append(interruption)
            raise
    if failures:
        raise failures[0]
    return [each.result() for each in results]
