"""Projected blocks against a plain count for each step."""

import math

from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.vllm_plugin.scheduler.projection import BlockProjection, Growth

SIZE = 4


def blocks_of(growth: Growth, step: int) -> int:
    """By the definition in `Growth`."""
    if step >= growth.end:
        return 0
    tokens = growth.num_tokens + math.ceil(max(step - growth.start, 0) * growth.tokens_per_step)
    return math.ceil(tokens / SIZE) - growth.num_shared_blocks


growths = st.builds(
    lambda start, steps, tokens, shared, speed: Growth(
        start, start + steps, tokens, min(shared, tokens // SIZE), speed
    ),
    start=st.integers(0, 40),
    steps=st.integers(1, 2000),
    tokens=st.integers(1, 100),
    shared=st.integers(0, 20),
    speed=st.sampled_from([1.0, 1.75]),
)
some = st.lists(growths, max_size=6)


@given(running=some, ended=some, new=growths, now=st.integers(0, 60))
def test_the_peak_is_that_of_all_steps_to_come(
    running: list[Growth], ended: list[Growth], new: Growth, now: int
) -> None:
    projection = BlockProjection(SIZE)
    for growth in (*running, *ended):
        projection.add(growth)
    projection.now = now
    for growth in ended:
        projection.add(growth, sign=-1)
    ends = [now, *(growth.end for growth in (*running, new))]
    totals = [
        sum(blocks_of(growth, step) for growth in running)
        + blocks_of(new, step)
        + (3 if step < new.end else 0)
        for step in range(now, max(ends) + 1)
    ]
    assert projection.peak_with(new, num_blocks=3) == max(totals)
