"""Streams of items: made ahead of their reader on threads, or collected into batches."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any, Final, TypeVar

_NUM_THREADS: Final = 8
"""Each thread holds at most the read-ahead of one file: 16 MiB."""

Item = TypeVar("Item")
T = TypeVar("T")


def ahead(
    items: Iterable[Item],
    work: Callable[[Item], T],
    *,
    num_threads: int = _NUM_THREADS,
    most: int | None = None,
) -> Generator[T]:
    """`map(work, items)` on threads, at most `most` items (`num_threads`) ahead of the caller.

    Errors come in the items' order; a caller that stops early waits for running calls.
    """
    with ThreadPoolExecutor(num_threads, "batchllm-ahead") as pool:
        under_way: deque[Future[T]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) > (most or num_threads):
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


@contextmanager
def one_ahead(items: Iterator[T]) -> Iterator[Iterator[T]]:
    """Iterate over `items`, with the next one made in a thread while the caller has this one.

    An error in making an item is raised in its place. The end of the context closes a generator,
    after its current item.
    """
    nothing: Any = object()
    made = ahead(repeat(items), lambda rest: next(rest, nothing), num_threads=1)
    with ExitStack() as stack:
        if isinstance(items, Generator):
            stack.callback(items.close)
        stack.callback(made.close)
        yield iter(lambda: next(made), nothing)


def batches_of(
    items: Iterable[T], *limits: tuple[float, Callable[[T], float]]
) -> Iterator[list[T]]:
    """Consecutive items in lists, each as long as no limit is exceeded.

    A limit is the largest sum of a list (one item may exceed it), and the size of an item.
    """
    batch: list[T] = []
    sums = [0.0] * len(limits)
    for item in items:
        sizes = [size(item) for _, size in limits]
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        if batch and any(total > most for total, (most, _) in zip(sums, limits, strict=True)):
            yield batch
            batch, sums = [], sizes
        batch.append(item)
    if batch:
        yield batch
