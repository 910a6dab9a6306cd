"""Keys of rows: as bytes for comparison, and as text for people."""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.errors import KeyColumnError
from batchllm_operator.prefixes import TokenTable

_MAX_SHOWN: Final = 100  # characters of a value
_BYTES: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def check_key_types(schema: pa.Schema, key: tuple[str, ...], where: str) -> None:
    """Raise `KeyColumnError` for the first key column whose type can't be compared."""
    for name in key:
        kind = schema.field(name).type
        try:
            _as_bytes(pa.array([], kind))
        except pa.ArrowException as error:
            raise KeyColumnError(
                f"{where}: column {name!r} holds {kind}, which can't be compared; choose a key of"
                " text, numbers, dates or times"
            ) from error


def encode_keys(batch: pa.RecordBatch, where: str) -> TokenTable:
    """A byte string per row, equal for equal keys only.

    `batch` has the key columns, without nulls, which would equal empty texts.

    Raises `KeyColumnError`: a column's type can't be compared; `where` names the table.
    """
    check_key_types(batch.schema, tuple(batch.schema.names), where)
    parts = []
    for values in batch.columns:
        column = _as_bytes(values)
        if batch.num_columns > 1:  # lengths distinguish ("a", "bc") from ("ab", "c")
            parts.append(pc.cast(pc.cast(pc.binary_length(column), pa.string()), pa.large_binary()))
        parts.append(column)
    separator = pa.scalar(b":", pa.large_binary())
    joined = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, separator)
    # Copied, so that the array begins where its buffers do.
    whole = pa.concat_arrays([joined, pa.array([b""], pa.large_binary())])
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[: batch.num_rows + 1].copy()
    content = np.frombuffer(data or b"", dtype=np.uint8)[: ends[-1]]
    return TokenTable(content.astype(np.int32), ends)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Raises `pa.ArrowException` for types that can't be compared, such as lists."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        column = pc.cast(column, pa.int64())  # its text would need a table of time zones
    if not any(is_bytes(kind) for is_bytes in _BYTES):
        column = pc.cast(column, pa.string())
    return pc.cast(column, pa.large_binary())


def shown_key(value: pa.Scalar) -> str:
    shown = repr(_in_python(value))
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def key_texts(batch: pa.RecordBatch, idx: int, key: tuple[str, ...]) -> dict[str, str]:
    """One row's key, for a report."""
    return {name: str(_in_python(batch.column(name)[idx])) for name in key}


def _in_python(value: pa.Scalar) -> object:
    """The value in Python; the stored number or text if Python has no such value."""
    try:
        if getattr(value.type, "unit", None) == "ns":  # where pandas is installed, it would be its
            if (value.value or 0) % 1000:
                return value.value
            value = value.cast(_in_microseconds(value.type))
        return value.as_py()
    except (ValueError, OverflowError, KeyError):  # KeyError: an unknown time zone
        if isinstance(value, pa.DictionaryScalar | pa.ExtensionScalar):
            return _in_python(value.value)
        if isinstance(value, pa.TimestampScalar | pa.DurationScalar | pa.Time64Scalar):
            return value.value
        if any(is_bytes(value.type) for is_bytes in _BYTES):  # text that isn't UTF-8
            return value.cast(pa.binary()).as_py()
        return value.cast(pa.string()).as_py()  # a date beyond the year 9999


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
