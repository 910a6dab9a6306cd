"""How many requests an engine takes before each step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.vllm_plugin.scheduler.feeding import most_in_flight, num_to_feed


def test_an_engine_begins_with_a_few_and_takes_some_more_in_each_step() -> None:
    held = 0
    fed: list[int] = []
    while len(fed) < 64:
        fed.append(num_to_feed(held, 0, 2048))
        held += fed[-1]
    assert fed == [64, *[32] * 62, 0]
    assert held == 2048 == most_in_flight(1024)


def test_what_a_step_finishes_is_replaced() -> None:
    assert num_to_feed(2048 - 500, 500, 2048) == 500
    assert num_to_feed(300, 500, 2048) == 532
    assert num_to_feed(0, 500, 2048) == 532, "of short prompts without outputs"
    assert num_to_feed(10, 3, 2048) == 54


def test_a_small_engine_takes_twice_what_it_runs() -> None:
    assert num_to_feed(0, 0, most_in_flight(1)) == 2
    assert num_to_feed(1, 1, most_in_flight(1)) == 1


@given(num_in_flight=st.integers(0, 3000), num_finished=st.integers(0, 3000), data=st.data())
def test_never_too_many_and_none_only_if_full(
    num_in_flight: int, num_finished: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(max(num_in_flight, 1), 4000))
    num = num_to_feed(num_in_flight, num_finished, most)
    assert 0 <= num <= most - num_in_flight
    assert num > 0 or num_in_flight == most
