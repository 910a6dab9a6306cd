"""Projected blocks against a plain count for each step."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection, Growth

SIZE = 4


def blocks_of(growth: Growth, step: int) -> int:
    """By the definition in `Growth`."""
    if step >= growth.end:
        return 0
    tokens = growth.num_tokens + max(step - growth.start, 0)
    return math.ceil(tokens / SIZE) - growth.num_shared_blocks


growths = st.builds(
    lambda start, steps, tokens, shared: Growth(
        start, start + steps, tokens, min(shared, tokens // SIZE)
    ),
    start=st.integers(0, 40),
    steps=st.integers(1, 2000),
    tokens=st.integers(1, 100),
    shared=st.integers(0, 20),
)


def test_a_request_grows_a_block_for_every_block_size_of_steps() -> None:
    projection = BlockProjection(SIZE)
    projection.add(Growth(start=0, end=6, num_tokens=3, num_shared_blocks=0))
    seen = []
    for step in range(8):
        projection.advance(step)
        seen.append(projection.num_blocks())
    assert seen == [1, 1, 2, 2, 2, 2, 0, 0]


@given(running=st.lists(growths, max_size=6), new=growths, now=st.integers(0, 60))
def test_the_peak_is_that_of_all_steps_to_come(
    running: list[Growth], new: Growth, now: int
) -> None:
    projection = BlockProjection(SIZE)
    for growth in running:
        projection.add(growth)
    projection.advance(now)
    ends = [now, *(growth.end for growth in (*running, new))]
    totals = [
        sum(blocks_of(growth, step) for growth in running)
        + blocks_of(new, step)
        + (3 if step < new.end else 0)
        for step in range(now, max(ends) + 1)
    ]
    assert projection.peak_with(new, num_blocks=3) == max(totals)


@given(
    steps=st.lists(st.tuples(st.integers(0, 700), growths), min_size=1, max_size=12),
    held=st.integers(0, 5),
)
def test_what_is_taken_out_again_leaves_nothing(steps: list[tuple[int, Growth]], held: int) -> None:
    projection, now, inside = BlockProjection(SIZE), 0, []
    projection.hold(held, until=None)
    for ahead, growth in steps:
        now += ahead
        projection.advance(now)
        later = Growth(
            growth.start + now, growth.end + now, growth.num_tokens, growth.num_shared_blocks
        )
        projection.add(later)
        inside.append(later)
    expected = held + sum(blocks_of(growth, now) for growth in inside)
    assert projection.num_blocks() == expected
    for growth in inside:
        projection.add(growth, sign=-1)
    nothing = Growth(now, now + 5000, 0, 0)
    assert projection.peak_with(nothing) == held + 1250


def test_held_blocks_count_in_their_steps_only() -> None:
    projection = BlockProjection(SIZE)
    projection.hold(7, 4, begin=2)
    seen = []
    for step in range(6):
        projection.advance(step)
        seen.append(projection.num_blocks())
    assert seen == [0, 0, 7, 7, 0, 0]
    projection.hold(7, 4, begin=2)  # it is over: nothing is counted
    assert projection.num_blocks() == 0
