"""Texts of values: the same for equal values, whatever type, zone or library they came in."""

import json
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm_operator.prompts.values import NoTextError, has_text, text_column

BROKEN = pa.StringArray.from_buffers(
    2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xff\xfe")
)
NOON = datetime(2026, 1, 31, 12, 30)


def texts(column: pa.Array) -> list[str | NoTextError | None]:
    """Of each value its text, its fault, or None for null."""
    found = text_column(column)
    assert found.texts.type == pa.large_string() and len(found.texts) == len(column)
    assert all(found.texts[row].as_py() is None for row in found.faults)
    return [found.faults.get(row, text) for row, text in enumerate(found.texts.to_pylist())]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([7, -5, None], pa.int8(), ["7", "-5", None]),
        ([2**64 - 1], pa.uint64(), ["18446744073709551615"]),
        ([0.1, 3.0, 1e20, 1e-7, None], pa.float64(), ["0.1", "3.0", "1e+20", "1e-07", None]),
        ([0.1, None, 1e8], pa.float32(), ["0.1", None, "100000000.0"]),
        ([np.float16(0.1), None], pa.float16(), ["0.1", None]),
        ([True, None, False], pa.bool_(), ["true", None, "false"]),
        ([Decimal("1.50"), None], pa.decimal128(9, 2), ["1.50", None]),
        ([Decimal("1E+10")], pa.decimal128(20, -5), ["10000000000"]),
        ([Decimal("-0.05")], pa.decimal256(60, 2), ["-0.05"]),
        ([date(2026, 1, 31), None], pa.date32(), ["2026-01-31", None]),
        ([date(1, 1, 1), date(9999, 12, 31)], pa.date64(), ["0001-01-01", "9999-12-31"]),
        ([NOON, None], pa.timestamp("s"), ["2026-01-31T12:30:00", None]),
        (
            [1500, -1, 0],
            pa.timestamp("ms"),
            ["1970-01-01T00:00:01.5", "1969-12-31T23:59:59.999", "1970-01-01T00:00:00"],
        ),
        ([1], pa.timestamp("ns"), ["1970-01-01T00:00:00.000000001"]),
        ([0], pa.timestamp("us", "UTC"), ["1970-01-01T00:00:00Z"]),
        ([0], pa.timestamp("us", "Europe/Berlin"), ["1970-01-01T00:00:00Z"]),
        ([0], pa.timestamp("us", "No/Such_Zone"), ["1970-01-01T00:00:00Z"]),
        ([time(9, 5)], pa.time32("s"), ["09:05:00"]),
        ([1, None], pa.time64("ns"), ["00:00:00.000000001", None]),
        ([None], pa.null(), [None]),
        (["a", None, "a"], pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"]),
        ([5, 5], pa.dictionary(pa.int8(), pa.int64()), ["5", "5"]),
        (['{"a": 1}'], pa.json_(), ['{"a": 1}']),
        (
            [["a", None, '"\\é'], [], None],
            pa.list_(pa.string()),
            ['["a", null, "\\"\\\\é"]', "[]", None],
        ),
        ([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2), ["[1, 2]", None, "[3, 4]"]),
        ([[0.1, 1.0]], pa.large_list(pa.float32()), ["[0.1, 1.0]"]),
        ([[1], None, []], pa.list_view(pa.int16()), ["[1]", None, "[]"]),
        ([[True], [False, None]], pa.list_(pa.bool_()), ["[true]", "[false, null]"]),
        ([[Decimal("1.50")]], pa.list_(pa.decimal128(9, 2)), ["[1.50]"]),
        ([[date(2026, 1, 31)]], pa.list_(pa.date32()), ['["2026-01-31"]']),
    ],
)
def test_scalars_and_lists_of_them(values: list[Any], kind: pa.DataType, expected: Any) -> None:
    array = pa.array(values, kind)
    assert has_text(kind)
    assert texts(array) == expected
    twice = pa.concat_arrays([array, array])
    assert texts(twice.slice(len(array))) == expected  # not the whole of its buffers


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (pa.array([1.0, float("nan")]), "not_finite"),
        (pa.array([1.0, float("-inf")], pa.float32()), "not_finite"),
        (pa.array([[1.0], [2.0, float("inf")]]), "not_finite"),
        (pa.array([0, 2**30], pa.int32()).cast(pa.date32()), "out_of_range"),
        (pa.array([0, 2**62], pa.timestamp("s")), "out_of_range"),
        (pa.array([0, 86400 * 10**9], pa.int64()).view(pa.time64("ns")), "out_of_range"),
        (BROKEN, "not_utf8"),
        (BROKEN.dictionary_encode(), "not_utf8"),
        (pa.array([b"x", b"\xff"], pa.binary_view()).view(pa.string_view()), "not_utf8"),
        (pa.ListArray.from_arrays([0, 1, 2], BROKEN), "not_utf8"),
    ],
)
def test_what_has_no_text_costs_its_row_only(array: pa.Array, code: str) -> None:
    first, second = texts(array)
    assert isinstance(first, str)
    assert isinstance(second, NoTextError)
    assert second.code == code


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.binary(4),
        pa.uuid(),
        pa.duration("s"),
        pa.month_day_nano_interval(),
        pa.struct([("a", pa.string())]),
        pa.map_(pa.string(), pa.string()),
        pa.list_(pa.list_(pa.int8())),
        pa.list_(pa.struct([("a", pa.int8())])),
        pa.list_(pa.binary()),
        pa.dictionary(pa.int8(), pa.binary()),
    ],
    ids=str,
)
def test_types_without_a_text(kind: pa.DataType) -> None:
    assert not has_text(kind)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_list_of_numbers_is_json_of_the_same_numbers(values: list[float]) -> None:
    [text] = texts(pa.array([values], pa.list_(pa.float64())))
    assert isinstance(text, str)
    assert json.loads(text) == values


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_narrow_number_is_told_from_its_neighbours(value: float) -> None:
    [text] = texts(pa.array([value], pa.float32()))
    assert isinstance(text, str)
    assert np.float32(text) == np.float32(value)


@given(st.lists(st.text()))
def test_a_list_of_texts_is_json_of_the_same_texts(values: list[str]) -> None:
    [text] = texts(pa.array([values], pa.list_(pa.string())))
    assert isinstance(text, str)
    assert json.loads(text) == values


@given(st.datetimes())
def test_an_instant_has_one_text_in_every_unit(value: datetime) -> None:
    [text] = texts(pa.array([value], pa.timestamp("us")))
    assert isinstance(text, str)
    assert datetime.fromisoformat(text) == value
    if 1700 < value.year < 2200:
        assert texts(pa.array([value], pa.timestamp("us")).cast(pa.timestamp("ns"))) == [text]
