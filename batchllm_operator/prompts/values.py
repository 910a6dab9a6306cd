"""Renders a column's values as text: the same text for the same value on any machine.

It depends on no locale, time zone or setting of Arrow. Values that are equal in two formats of a
table (32 or 64 bits, dictionaries, milliseconds or nanoseconds) have equal texts.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchllm_operator.row_error import RowError

NOT_UTF8: Final = "not_utf8"
NOT_FINITE: Final = "not_finite"
OUT_OF_RANGE: Final = "out_of_range"
_DAY_S: Final = 24 * 60 * 60
_FIRST_DAY, _END_DAY = -719162, 2932897  # of the years 1 to 9999, from 1970-01-01
_TICKS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # in a second
_MS: Final = pa.timestamp("ms")
_INT64: Final = np.iinfo(np.int64)


class NoTextError(ValueError):
    """Why a value has no text: a code, and the message after the column's name."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason

    def of(self, column: str) -> RowError:
        """The error of a row with this value in a column."""
        return RowError(self.code, f"column {column!r} {self.reason}")


def not_utf8(error: UnicodeDecodeError) -> NoTextError:
    return NoTextError(NOT_UTF8, f"isn't valid UTF-8: {error.reason}")


class TextColumn(NamedTuple):
    """Texts of a column: large strings, null for null and for a value with a fault."""

    texts: pa.LargeStringArray
    faults: dict[int, NoTextError]

    def filled(self) -> TextColumn:
        """The same, with the empty text for null."""
        return self._replace(texts=_without(self.texts.fill_null(""), self.faults))


def has_text(kind: pa.DataType) -> bool:
    """Whether values of a column of this type have a text: scalars and lists of them, but not
    bytes, durations, structs, maps and lists of lists."""
    return _scalar_texts(kind.value_type if is_list(kind) else kind) is not None


def text_column(column: pa.Array) -> TextColumn:
    """The text of each value of a column whose type `has_text`."""
    if is_list(column.type):
        return _lists(column)
    make = _scalar_texts(column.type)
    assert make is not None, column.type
    while isinstance(column, pa.ExtensionArray | pa.DictionaryArray):
        is_dictionary = isinstance(column, pa.DictionaryArray)
        column = column.dictionary_decode() if is_dictionary else column.storage
    return make(column)


def is_list(kind: pa.DataType) -> bool:
    is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
    is_other = types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(types.is_list(kind) or is_other or is_view)


def storage_of(kind: pa.DataType) -> pa.DataType:
    """The type of the values that a dictionary or an extension stands for."""
    while isinstance(kind, pa.BaseExtensionType | pa.DictionaryType):
        is_dictionary = isinstance(kind, pa.DictionaryType)
        kind = kind.value_type if is_dictionary else kind.storage_type
    return kind


def _scalar_texts(kind: pa.DataType) -> Callable[[pa.Array], TextColumn] | None:
    """The function that renders a column of scalars, once decoded; None for other types."""
    is_extension = isinstance(kind, pa.BaseExtensionType)
    kind = storage_of(kind)
    if is_extension:  # JSON is text with a name
        return _strings if is_string(kind) else None
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind):
        return lambda column: TextColumn(column.cast(pa.large_string()), {})
    makers: dict[Callable[[pa.DataType], bool], Callable[[pa.Array], TextColumn]] = {
        is_string: _strings,
        types.is_floating: _floats,
        types.is_decimal: _decimals,
        types.is_date: _dates,
        types.is_timestamp: _timestamps,
        types.is_time: _times,
    }
    return next((make for is_kind, make in makers.items() if is_kind(kind)), None)


def is_string(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _strings(column: pa.Array) -> TextColumn:
    column = column.cast(pa.large_string())
    faults = {}
    try:
        column.validate(full=True)  # readers of Parquet don't validate text
    except pa.ArrowInvalid:
        for row, scalar in enumerate(column):
            try:
                scalar.as_py()
            except UnicodeDecodeError as error:
                faults[row] = not_utf8(error)
    return TextColumn(_without(column, faults), faults)


def _floats(column: pa.Array) -> TextColumn:
    """The fewest digits that identify a number of its type."""
    texts: list[str | None] = [None] * len(column)
    faults = {}
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)).tolist()
    numbers = column.drop_null().to_numpy(zero_copy_only=False)
    for row, number in zip(rows, numbers, strict=True):
        if math.isfinite(number):
            # numpy finds the fewest digits of each width; as a double they are the same.
            texts[row] = repr(float(str(number)))
        else:
            faults[row] = NoTextError(NOT_FINITE, f"is {number}, which isn't a number to place")
    return TextColumn(pa.array(texts, pa.large_string()), faults)


def _decimals(column: pa.Array) -> TextColumn:  # Arrow writes small ones with an exponent
    texts = [v if v is None else format(v, "f") for v in column.to_pylist()]
    return TextColumn(pa.array(texts, pa.large_string()), {})


def _dates(column: pa.Array) -> TextColumn:
    in_day, known_as = (1, pa.date32()) if types.is_date32(column.type) else (_DAY_S * 1000, _MS)
    text, faults = _moments(column, known_as, _FIRST_DAY * in_day, _END_DAY * in_day)
    return TextColumn(pc.utf8_slice_codeunits(text, 0, len("2026-01-31")), faults)


def _timestamps(column: pa.Array) -> TextColumn:
    """In UTC if the column has a time zone, else unchanged."""
    unit, in_day = column.type.unit, _TICKS[column.type.unit] * _DAY_S
    text, faults = _moments(column, pa.timestamp(unit), _FIRST_DAY * in_day, _END_DAY * in_day)
    text = pc.replace_substring(text, " ", "T")
    if column.type.tz is not None:
        text = pc.replace_substring_regex(text, "$", "Z")
    return TextColumn(text, faults)


def _times(column: pa.Array) -> TextColumn:
    return _moments(column, column.type, 0, _TICKS[column.type.unit] * _DAY_S)


def _moments(column: pa.Array, known_as: pa.DataType, first: int, end: int) -> TextColumn:
    """Texts of the stored integers, as which they are known; a fault if outside [first, end).

    Without trailing zeros in a second's fraction, and without a trailing point.
    """
    stored = column.view(pa.int64() if column.type.bit_width == 64 else pa.int32())
    low, high = (pa.scalar(min(max(v, _INT64.min), _INT64.max)) for v in (first, end - 1))
    is_out = pc.or_(pc.less(stored, low), pc.greater(stored, high)).fill_null(False)
    reason = "holds no time of the years 1 to 9999, or of a day"
    rows = np.flatnonzero(is_out.to_numpy(zero_copy_only=False))
    faults = dict.fromkeys(rows.tolist(), NoTextError(OUT_OF_RANGE, reason))
    text = _without(stored, faults).view(known_as).cast(pa.large_string())
    return TextColumn(pc.replace_substring_regex(text, r"(\.\d*[1-9])0+$|\.0+$", r"\1"), faults)


def _lists(column: pa.Array) -> TextColumn:
    """JSON, with bare numbers and booleans, and all else as strings."""
    elements, kind = text_column(column.flatten()), storage_of(column.type.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    is_bare = is_number or types.is_boolean(kind)
    texts = [
        "null" if text is None else text if is_bare else json.dumps(text, ensure_ascii=False)
        for text in elements.texts.to_pylist()
    ]
    sizes = column.value_lengths().to_pylist()
    ends = list(accumulate(size or 0 for size in sizes))
    lists = [
        None if size is None else f"[{', '.join(texts[end - size : end])}]"
        for size, end in zip(sizes, ends, strict=True)
    ]
    faults: dict[int, NoTextError] = {}
    for idx, fault in elements.faults.items():
        faults.setdefault(bisect_right(ends, idx), fault)
    return TextColumn(_without(pa.array(lists, pa.large_string()), faults), faults)


def _without(column: pa.Array, faults: dict[int, NoTextError]) -> pa.Array:
    """`column`, null where there is a fault."""
    if not faults:
        return column
    is_out = np.zeros(len(column), dtype=np.bool_)
    is_out[list(faults)] = True
    return pc.if_else(pa.array(is_out), pa.scalar(None, column.type), column)
