"""Numbers that a spec bounds, from batches as they come: those of all rows together."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.answers import expectations
from batchllm_operator.answers.expectations import Distinct, Measured, Numbers, Tally, Watched
from batchllm_operator.lake import find_place
from batchllm_operator.spec.expect import Expectation

ANY = {"min": 0}
TEXTS = st.lists(st.lists(st.none() | st.text("ab \n\u00e9", max_size=3), max_size=6), max_size=5)
NUMBERS = st.lists(st.lists(st.none() | st.integers(-3, 9), max_size=6), max_size=5)


def measured(expected: dict[str, Any], batches: Sequence[pa.Array]) -> dict[str, float | None]:
    tally = Tally(Expectation.model_validate(expected))
    for batch in batches:
        tally.add(batch)
    return {each.what: each.value for each in tally.measured("column", None)}


def quantile(values: list[int], share: float) -> int | None:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1] if values else None


@given(TEXTS)
def test_shares_and_lengths_of_texts_are_those_of_all_rows(batches: list[list[str | None]]) -> None:
    expected = {
        **dict.fromkeys(("missing", "empty", "duplicate"), ANY),
        "values": {"a": ANY, "absent": ANY},
        "matches": {"^a": ANY, "b$": ANY},
        "quantiles": {"p0": ANY, "p50": ANY, "p75": ANY, "p100": ANY},
    }
    found = measured(expected, [pa.array(batch, pa.string()) for batch in batches])
    rows = [value for batch in batches for value in batch]
    texts = [value for value in rows if value is not None]

    def share(number: int, of: list[Any]) -> float | None:
        return number / len(of) if of else None

    assert found == {
        "missing": share(rows.count(None), rows),
        "empty": share(sum(not text.strip() for text in texts), texts),
        "duplicate": pytest.approx(share(len(texts) - len(set(texts)), texts)),
        "values.a": share(texts.count("a"), texts),
        "values.absent": share(0, texts),
        "matches.^a": share(sum(text.startswith("a") for text in texts), texts),
        "matches.b$": share(sum(bool(re.search(r"b\Z", text)) for text in texts), texts),
        **{f"quantiles.p{q}": quantile([*map(len, texts)], q / 100) for q in (0, 50, 75, 100)},
    }


@given(NUMBERS)
def test_ranges_and_quantiles_of_numbers_are_those_of_all_rows(
    batches: list[list[int | None]],
) -> None:
    expected = {"range": {"min": 0, "max": 5}, "quantiles": {"p99.9": ANY}, "values": {"3": ANY}}
    found = measured(expected, [pa.array(batch, pa.int32()) for batch in batches])
    numbers = [value for batch in batches for value in batch if value is not None]
    assert found == {
        "values.3": numbers.count(3) / len(numbers) if numbers else None,
        "quantiles.p99.9": max(numbers, default=None),
        "range.min": min(numbers, default=None),
        "range.max": max(numbers, default=None),
    }


def test_a_message_keeps_the_digits_of_large_numbers() -> None:
    price = Measured(column="price", what="range.max", value=10_000_001, max=1e7)
    assert str(price) == "price: range.max is 10000001, expected at most 10000000"
    share = Measured(column="text", what="empty", value=1 / 3, max=0.25)
    assert str(share) == "text: empty is 0.333333, expected at most 0.25"


@given(TEXTS, TEXTS)
def test_drift_is_half_the_sum_of_differences(
    ours: list[list[str | None]], theirs: list[list[str | None]]
) -> None:
    tallies, shares = [], []
    for batches in (ours, theirs):
        tallies.append(Tally(Expectation.model_validate({"drift": {"max": 0.5}})))
        for batch in batches:
            tallies[-1].add(pa.array(batch, pa.string()))
        counts = Counter(value for batch in batches for value in batch if value is not None)
        shares.append({value: number / counts.total() for value, number in counts.items()})
    [drift] = tallies[0].measured("column", tallies[1])
    ours_by, theirs_by = shares
    if not ours_by or not theirs_by:
        assert drift.value is None and drift.is_met
        return
    names = ours_by.keys() | theirs_by.keys()
    wanted = sum(abs(ours_by.get(n, 0) - theirs_by.get(n, 0)) for n in names) / 2
    assert drift.value == pytest.approx(wanted)
    assert drift.is_met == ((drift.value or 0) <= 0.5)


def test_an_infinite_number_is_outside_of_a_range() -> None:
    tally = Tally(Expectation.model_validate({"range": {"min": -100, "max": 0}}))
    tally.add(pa.array([-1.5, -math.inf]))
    low, high = tally.measured("mean_logprob", None)
    assert (low.is_met, high.is_met, high.value) == (False, True, -1.5)


def test_memory_is_bounded_and_errors_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("DIGESTS", 1 << 12), ("NUMBERS", 64), ("VALUES", 3)):
        monkeypatch.setattr(expectations, f"_MOST_{name}", most)
    distinct, numbers = Distinct(), Numbers()
    for start in range(0, 100_000, 1000):
        distinct.add(pa.array([f"text {n // 2}" for n in range(start, start + 1000)]))
        numbers.add(pa.array(range(start, start + 1000)))
    assert distinct.number == pytest.approx(50_000, rel=0.1)
    assert len(distinct._kept) <= 1 << 12
    assert len(numbers._counts) <= 64
    for share in (1, 50, 99):
        assert 0 <= share * 1000 - numbers.quantile(f"p{share}") <= numbers._step
    found = measured(
        {"values": {"late": ANY}}, [pa.array(list("abcdef")), pa.array(["late", "late"])]
    )
    assert found == {"values.late": 0.25}


STATUSES = ("ok", "cut_off", "failed", "skipped")
ROWS = st.lists(
    st.tuples(st.none() | st.sampled_from(["", " ", "a", "b", "ab"]), st.sampled_from(STATUSES))
)
SHARES = st.sampled_from([0, 0.3, 1])


def watched_in(batch: pa.RecordBatch, name: str, expected: Expectation) -> Watched:
    """A column of rows whose statuses are in column `s`."""
    place, status = (find_place(batch.schema, column) for column in (name, "s"))
    assert place is not None and status is not None
    return Watched(name, place, status, expected)


@given(ROWS, st.sampled_from(["missing", "empty", "matches.a", "values.a"]), SHARES, st.booleans())
def test_without_the_rows_at_fault_a_bound_is_met(
    rows: list[tuple[str | None, str]], what: str, share: float, is_most: bool
) -> None:
    kind, _, name = what.partition(".")
    bound = {"max" if is_most else "min": share}
    expected = Expectation.model_validate({kind: {name: bound} if name else bound})
    batch = pa.record_batch(
        [[*column] for column in zip(*rows, strict=True)] or [[], []], ["t", "s"]
    )
    batch = batch.cast(pa.schema({"t": pa.string(), "s": pa.string()}))
    watched = watched_in(batch, "t", expected)

    def measure(rows: pa.RecordBatch) -> Any:
        tally = Tally(expected)
        tally.add(watched.chosen(rows))
        [found] = tally.measured("t", None)
        return found

    faults = watched.at_fault(batch, measure(batch)).to_pylist()
    is_so: dict[str, Any] = {
        "missing": lambda text: text is None,
        "empty": lambda text: text is not None and not text.strip(),
        "matches": lambda text: text is not None and "a" in text,
        "values": lambda text: text == "a",
    }
    for (text, status), is_fault in zip(rows, faults, strict=True):
        counts = status in ("ok", "cut_off") and (text is not None or kind == "missing")
        assert is_fault == (counts and is_so[kind](text) == is_most)
    rest = measure(batch.filter(pa.array([not fault for fault in faults], pa.bool_())))
    assert rest.is_met


@pytest.mark.parametrize("numbers", [[1, None, 5, 9], [1.0, math.nan, 5.0, math.inf]])
def test_rows_out_of_a_range_are_at_fault(numbers: list[float | None]) -> None:
    expected = Expectation.model_validate({"range": {"min": 2, "max": 6}})
    batch = pa.record_batch([pa.array(numbers), ["ok"] * 4], ["n", "s"])
    watched = watched_in(batch, "n", expected)
    tally = Tally(expected)
    tally.add(watched.chosen(batch))
    low, high = tally.measured("n", None)
    assert watched.at_fault(batch, low).to_pylist() == [True, False, False, False]
    assert watched.at_fault(batch, high).to_pylist() == [False, False, False, True]


def test_a_share_of_statuses_is_at_fault_where_a_row_was_asked() -> None:
    expected = Expectation.model_validate({"values": {"failed": {"max": 0.1}, "ok": {"min": 0.9}}})
    batch = pa.record_batch([pa.array(STATUSES)], ["s"])
    tally, watched = Tally(expected), watched_in(batch, "s", expected)
    tally.add(watched.chosen(batch))
    failed, ok = tally.measured("s", None)
    assert watched.at_fault(batch, failed).to_pylist() == [False, False, True, False]
    assert watched.at_fault(batch, ok).to_pylist() == [False, True, True, False]
