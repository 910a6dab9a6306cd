"""The rate of prefill at which memory stays full, and of requests at which an engine stays busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.vllm_plugin.scheduler.hints import StepCost
from batchllm_operator.vllm_plugin.scheduler.pacing import (
    AverageRequest,
    Pace,
    Waiting,
    fill_share,
    most_in_flight,
    num_to_feed,
)

# 320 prompt tokens in 20 blocks, and 160 output tokens in 10 more, 5 on average.
REQUEST = AverageRequest(
    prefill_tokens=320.0,
    output_tokens=160.0,
    output_steps=160.0,
    final_blocks=30.0,
    mean_blocks=25.0,
)


def waiting(num_requests: int) -> Waiting:
    """Sums over requests like that."""
    return Waiting(
        num_requests=num_requests,
        num_prefill_tokens=320.0 * num_requests,
        num_prompt_blocks=20.0 * num_requests,
        num_output_tokens=160 * num_requests,
        num_prompt_block_steps=20.0 * 160 * num_requests,
        num_output_block_steps=160**2 / (2 * 16) * num_requests,
    )


def test_the_average_is_that_of_equal_requests() -> None:
    assert waiting(7).average(scale=1.0, block_size=16) == REQUEST


def test_longer_outputs_than_estimated_take_more_block_steps() -> None:
    average = waiting(7).average(scale=2.0, block_size=16)
    assert average == AverageRequest(320.0, 320.0, 320.0, final_blocks=40.0, mean_blocks=30.0)


def test_what_is_taken_out_of_the_sums_is_gone() -> None:
    assert waiting(7).plus(waiting(4), sign=-1) == waiting(3)


def test_the_rate_fills_memory_by_littles_law() -> None:
    pace = Pace(num_blocks=2500, most_tokens=8192)
    # 100 requests of 25 blocks on average, each for 160 steps, each with 320 tokens to prefill.
    assert pace.rate(REQUEST) == pytest.approx(100 / 160 * 320)


def test_a_faster_fill_counts_the_blocks_of_younger_requests() -> None:
    pace = Pace(num_blocks=2500, most_tokens=8192)
    pace.fill_share = 0.5
    assert pace.rate(REQUEST) == pytest.approx(2500 / 27.5 / 80 * 320)


def test_prefill_that_was_not_used_is_saved_up_for_a_step_only() -> None:
    pace = Pace(num_blocks=2500, most_tokens=8192)
    assert [pace.next_step(REQUEST) for _ in range(4)] == [200.0, 400.0, 400.0, 400.0]
    pace.used(450)  # a prefix that had to be finished
    assert pace.next_step(REQUEST) == 150.0
    pace.used(10_000)
    assert [pace.next_step(REQUEST) for _ in range(3)] == [0.0, 0.0, 200.0]


def test_drafts_shorten_the_steps_that_blocks_are_held() -> None:
    average = waiting(7).average(scale=1.0, block_size=16, tokens_per_step=4.0)
    assert (average.output_tokens, average.output_steps) == (160.0, 40.0)
    pace = Pace(num_blocks=2500, most_tokens=8192)
    assert pace.rate(average) == pytest.approx(100 / 40 * 320)


def test_a_prompt_that_has_begun_takes_a_sixteenth_of_its_outputs_steps() -> None:
    pace = Pace(num_blocks=25, most_tokens=8192)  # one request at a time: 2 tokens a step
    assert pace.rate(REQUEST) == pytest.approx(2.0)
    tokens = 0.0
    for num_steps in range(1, 100):
        now = pace.next_step(REQUEST, is_prefilling=num_steps > 1)
        pace.used(int(now))
        tokens += now
        if tokens >= 320:
            break
    assert num_steps == 160 / 16
    waited = 0
    while pace.next_step(REQUEST) == 0.0:  # the next prompt begins when this one is paid for
        waited += 1
    assert 140 <= waited + num_steps <= 160


def test_a_pace_below_a_token_a_step_is_a_token_now_and_then() -> None:
    slow = AverageRequest(10.0, 400.0, 400.0, final_blocks=26.0, mean_blocks=13.5)
    pace = Pace(num_blocks=260, most_tokens=8192)
    assert pace.rate(slow) < 1
    given = []
    for _ in range(1000):
        given.append(int(pace.next_step(slow)))
        pace.used(given[-1])
    assert sum(given) == pytest.approx(1000 * pace.rate(slow), abs=11)


def test_a_large_job_fills_memory_at_the_slowest_rate() -> None:
    assert fill_share(REQUEST, num_requests=10_000, num_blocks=2500, most_tokens=8192) == 1.0


def test_a_job_of_a_few_memories_is_filled_faster() -> None:
    """In waves of 85: 2 * 160 + 0.95 * 0.1 * 160 steps and one output, not 2.5 * 160 and one."""
    share = fill_share(REQUEST, num_requests=250, num_blocks=2500, most_tokens=8192)
    assert 0.05 < share < 0.2


def test_prefill_is_not_spread_where_that_costs_time() -> None:
    """Steps that cost the same whatever they hold: fewer is all that counts."""
    costly = StepCost(token_s=0.0, weights_s=0.0, overhead_s=0.02)
    free = StepCost(token_s=1e-3, weights_s=0.0, overhead_s=0.0)
    shares = {
        cost: fill_share(REQUEST, 250, 2500, most_tokens=8192, cost=cost) for cost in (costly, free)
    }
    assert shares[costly] < shares[free]


def test_the_cost_of_a_step_is_at_least_reading_the_weights() -> None:
    cost = StepCost(token_s=2e-6, weights_s=4e-3, overhead_s=1e-3)
    assert cost.seconds(1) == cost.seconds(2000) == pytest.approx(5e-3)
    assert cost.seconds(4000) == pytest.approx(9e-3)


def test_an_engine_begins_with_a_few_and_takes_some_more_in_each_step() -> None:
    held = 0
    fed: list[int] = []
    while len(fed) < 64:
        fed.append(num_to_feed(held, 0, 2048))
        held += fed[-1]
    assert fed == [64, *[32] * 62, 0]
    assert held == 2048 == most_in_flight(1024)


@pytest.mark.parametrize(
    ("num_in_flight", "num_finished", "most", "expected"),
    [
        (2048 - 500, 500, 2048, 500),
        (300, 500, 2048, 532),
        (0, 500, 2048, 532),  # of short prompts without outputs
        (10, 3, 2048, 54),
        (0, 0, most_in_flight(1), 2),
        (1, 1, most_in_flight(1), 1),
    ],
)
def test_what_a_step_finishes_is_replaced(
    num_in_flight: int, num_finished: int, most: int, expected: int
) -> None:
    assert num_to_feed(num_in_flight, num_finished, most) == expected


@given(num_in_flight=st.integers(0, 3000), num_finished=st.integers(0, 3000), data=st.data())
def test_never_too_many_and_none_only_if_full(
    num_in_flight: int, num_finished: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(max(num_in_flight, 1), 4000))
    num = num_to_feed(num_in_flight, num_finished, most)
    assert 0 <= num <= most - num_in_flight
    assert num > 0 or num_in_flight == most
