"""The rate of prefill at which memory stays full, and of requests at which an engine stays busy."""

import pytest

from batchllm_operator.vllm_plugin.scheduler.hints import StepCost
from batchllm_operator.vllm_plugin.scheduler.pacing import (
    AverageRequest,
    Pace,
    fill_share,
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


@pytest.mark.parametrize(
    ("num_in_flight", "num_finished", "max_num_seqs", "expected"),
    [
        (0, 0, 1024, 64),  # an engine begins with a few
        (64, 0, 1024, 32),  # and takes some more in each step
        (2048, 0, 1024, 0),
        (2048 - 500, 500, 1024, 500),
        (300, 500, 1024, 532),
        (10, 3, 1024, 54),
        (0, 0, 1, 2),
        (1, 1, 1, 1),
    ],
)
def test_what_a_step_finishes_is_replaced(
    num_in_flight: int, num_finished: int, max_num_seqs: int, expected: int
) -> None:
    assert num_to_feed(num_in_flight, num_finished, max_num_seqs) == expected
