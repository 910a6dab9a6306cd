"""The text that a value of a column has in a prompt: one for each value, on any machine.

Nothing here asks for a locale, a time zone or a setting of Arrow's, and values that are equal in
two formats of a table (32 or 64 bits, dictionaries, milliseconds or nanoseconds) have equal texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

NOT_UTF8: Final = "not_utf8"
NOT_FINITE: Final = "not_finite"
OUT_OF_RANGE: Final = "out_of_range"
_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_DAY: Final = _EPOCH.toordinal()
_DAY_S: Final = 24 * 60 * 60
_TICKS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # in a second


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a value has no text: a code, and what is said of the column after its name."""

    code: str
    reason: str


Text = str | Fault | None
"""A value's text; None for null."""


def has_text(kind: pa.DataType) -> bool:
    """Whether values of a column of this type have a text: scalars, and lists of them.

    Bytes, durations, structs, maps and lists of lists have no obvious text.
    """
    if _is_list(kind):
        return _scalar_texts(kind.value_type) is not None
    return _scalar_texts(kind) is not None


@dataclass(frozen=True, slots=True)
class TextColumn:
    """Texts of a column: large strings, null for null and for a value with a fault."""

    texts: pa.LargeStringArray
    faults: dict[int, Fault]


def text_column(column: pa.Array) -> TextColumn:
    """The text of each value of a column for whose type `has_text`."""
    if _is_list(column.type):
        found = list(_lists(column))
    else:
        column = _plain(column)
        if _is_string(column.type) or _is_cast(column.type):
            texts = pc.cast(column, pa.large_string())
            try:
                texts.validate(full=True)  # readers of Parquet don't look at text
                return TextColumn(texts, {})
            except pa.ArrowInvalid:
                pass
        found = _scalars(column)
    faults = {row: each for row, each in enumerate(found) if isinstance(each, Fault)}
    texts = pa.array(
        [None if isinstance(each, Fault) else each for each in found], pa.large_string()
    )
    return TextColumn(texts, faults)


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _scalar_texts(kind: pa.DataType) -> Callable[[pa.Array], list[Text]] | None:
    """What makes the texts of a column of scalars; None for other types."""
    if isinstance(kind, pa.BaseExtensionType):  # JSON is text with a name
        return _strings if _is_string(kind.storage_type) else None
    if types.is_dictionary(kind):
        return _scalar_texts(kind.value_type)
    if _is_cast(kind):
        return lambda column: column.cast(pa.string()).to_pylist()
    if _is_string(kind):
        return _strings
    if types.is_floating(kind):
        return _floats
    if types.is_decimal(kind):
        return lambda column: [v if v is None else format(v, "f") for v in column.to_pylist()]
    if types.is_date(kind):
        return _dates
    if types.is_timestamp(kind):
        return _timestamps
    if types.is_time(kind):
        return _times
    return None


def _is_string(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_cast(kind: pa.DataType) -> bool:
    """Whether Arrow's cast gives the text."""
    return bool(types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind))


def _plain(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _scalars(column: pa.Array) -> list[Text]:
    column = _plain(column)
    make = _scalar_texts(column.type)
    assert make is not None, column.type  # the caller has asked `has_text`
    return make(column)


def _lists(column: pa.Array) -> Iterator[Text]:
    """JSON, with numbers and booleans bare and all else as strings."""
    is_bare = _is_bare(column.type.value_type)
    elements = iter(_scalars(column.flatten()))
    for size in column.value_lengths().to_pylist():
        if size is None:
            yield None
            continue
        own = [next(elements) for _ in range(size)]
        fault = next((each for each in own if isinstance(each, Fault)), None)
        yield fault or f"[{', '.join(_json(each, is_bare) for each in own)}]"


def _is_bare(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_bare(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(is_number or types.is_boolean(kind))


def _json(text: Text, is_bare: bool) -> str:
    if text is None:
        return "null"
    assert isinstance(text, str)
    return text if is_bare else json.dumps(text, ensure_ascii=False)


def _strings(column: pa.Array) -> list[Text]:
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_string(scalar) for scalar in column]


def _string(scalar: pa.Scalar) -> Text:
    try:
        text: str | None = scalar.as_py()
    except UnicodeDecodeError as error:
        return Fault(NOT_UTF8, f"isn't valid UTF-8: {error.reason}")
    return text


def _floats(column: pa.Array) -> list[Text]:
    """The fewest digits that tell a number from its neighbours of the same type."""
    if not types.is_float64(column.type):
        # numpy knows the fewest digits of each width. They are those of a double, too.
        narrow = column.drop_null().to_numpy(zero_copy_only=False)
        doubles = iter([float(str(value)) for value in narrow])
        values = [next(doubles) if valid else None for valid in column.is_valid().to_pylist()]
    else:
        values = column.to_pylist()
    return [_float(value) for value in values]


def _float(value: float | None) -> Text:
    if value is None:
        return None
    if not math.isfinite(value):
        return Fault(NOT_FINITE, f"is {value}, which isn't a number to place")
    return repr(value)


def _dates(column: pa.Array) -> list[Text]:
    if types.is_date64(column.type):  # milliseconds
        days = [v if v is None else v // (_DAY_S * 1000) for v in _integers(column)]
    else:
        days = _integers(column)
    return [v if v is None else _in_range(_date, v) for v in days]


def _date(days: int) -> str:
    return date.fromordinal(_EPOCH_DAY + days).isoformat()


def _timestamps(column: pa.Array) -> list[Text]:
    """In UTC if the column has a time zone, else as they are."""
    ticks = _TICKS[column.type.unit]
    zone = "Z" if column.type.tz is not None else ""
    found = _integers(column)
    return [v if v is None else _in_range(_timestamp, v, ticks, zone) for v in found]


def _timestamp(value: int, ticks: int, zone: str) -> str:
    seconds, fraction = divmod(value, ticks)
    return (_EPOCH + timedelta(seconds=seconds)).isoformat() + _fraction(fraction, ticks) + zone


def _times(column: pa.Array) -> list[Text]:
    ticks = _TICKS[column.type.unit]
    return [v if v is None else _in_range(_time, v, ticks) for v in _integers(column)]


def _time(value: int, ticks: int) -> str:
    seconds, fraction = divmod(value, ticks)
    if not 0 <= seconds < _DAY_S:
        raise OverflowError
    return (_EPOCH + timedelta(seconds=seconds)).time().isoformat() + _fraction(fraction, ticks)


def _fraction(value: int, ticks: int) -> str:
    """Of a second: nothing, or a point and digits up to the last that isn't 0."""
    num_digits = len(str(ticks)) - 1
    return f".{value:0{num_digits}d}".rstrip("0") if value else ""


def _integers(column: pa.Array) -> list[int | None]:
    """What is stored, of a type that has more than an integer's meaning."""
    wide = column.type.bit_width == 64
    return list(column.view(pa.int64() if wide else pa.int32()).to_pylist())


def _in_range(make: Callable[..., str], *value: Any) -> Text:
    try:
        return make(*value)
    except (OverflowError, ValueError):
        return Fault(OUT_OF_RANGE, "holds no time of the years 1 to 9999, or of a day")
