"""Partitions are compared by the numbers and dates that their names spell."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.lake import before, in_order


@pytest.mark.parametrize(
    "ascending",
    [
        ["9", "10", "100"],
        ["-10", "-9", "-1.5", "0", "1.25", "1.5"],
        ["week9", "week10"],
        ["2026-W9", "2026-W10", "2027-W1"],
        ["2026-1-9", "2026-1-10", "2026-10-1"],
        ["2025-12-31 23:00:00", "2026-01-01 00:00:00", "2026-01-01 9:00:00"],
        ["a", "b", "b1"],
        ["1", "b", "é", "\u0661"],
    ],
)
def test_names_are_ordered_by_what_they_spell(ascending: list[str]) -> None:
    assert in_order(reversed(ascending)) == ascending
    for number, name in enumerate(ascending):
        assert before(ascending, name) == ascending[:number]


@given(st.lists(st.dates(), unique=True), st.dates())
def test_dates_are_in_the_order_of_time(days: list[datetime.date], day: datetime.date) -> None:
    names = [each.isoformat() for each in days]
    assert before(names, day.isoformat()) == [
        each.isoformat() for each in sorted(days) if each < day
    ]


@given(st.lists(st.text()), st.text())
def test_any_names_have_an_order(names: list[str], name: str) -> None:
    assert set(before(names, name)) <= set(names) - {name}
    assert set(in_order(names)) == set(names)
