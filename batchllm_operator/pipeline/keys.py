"""Whether the key columns identify rows, checked without holding the keys in memory.

Keys are byte strings, and finding equal ones among millions is what the prefix search does with
prompts: on disk where memory is short, and compared byte by byte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import KeyColumnError
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.planner import (
    Phase,
    PrefixSearch,
    PromptStore,
    RankedPrompts,
    SearchMemory,
    TokenTable,
)

_KEYS_FILE: Final = "keys.bin"
_ENCODED_BYTES: Final = 4 << 20  # of keys at a time; the search takes four times as much for them
_MAX_NAMED: Final = 10
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


def check_keys(
    rows_file: Path,
    key: tuple[str, ...],
    where: str,
    spool: Path,
    memory: SearchMemory,
    phase: Phase | None = None,
) -> None:
    """Each row must have a key, and one of its own.

    Args:
        rows_file: local Parquet file that has the key columns.
        key: their names.
        where: what to call the table in an error.
        spool: a folder for temporary files; nothing stays there.
        memory: what the search may take.
        phase: see `PrefixSearch.finish`.

    Raises:
        KeyColumnError: names up to ten offenders.
        OSError: the disk is full.
    """
    with (
        tempfile.TemporaryDirectory(dir=spool) as folder,
        PromptStore(Path(folder) / _KEYS_FILE) as keys,
    ):
        _check_nulls(rows_file, key, where)
        search = PrefixSearch(Path(folder), memory=memory)
        for batch in _read(rows_file, key):
            num_rows = max(1, batch.num_rows * _ENCODED_BYTES // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, num_rows):
                encoded = encode_keys(batch.slice(start, num_rows), where)
                keys.append(encoded)
                search.add(encoded)
        _check_repeats(rows_file, key, where, search.finish(keys, phase))


def check_key_types(schema: pa.Schema, key: tuple[str, ...], where: str) -> None:
    """Refuse key columns whose values can't be compared, before any is read.

    Raises:
        KeyColumnError: names the first.
    """
    for name in key:
        kind = schema.field(name).type
        try:
            _as_bytes(pa.array([], kind))
        except pa.ArrowException as error:
            raise KeyColumnError(
                f"{where}: column {name!r} holds {kind}, which can't be compared; choose a key of"
                " text, numbers, dates or times"
            ) from error


def _read(rows_file: Path, key: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The key columns, in the order of `key`, in small batches."""
    stored = pq.read_schema(rows_file)
    with rows_file.open("rb") as file:
        yield from read_batches(file, pa.schema([stored.field(name) for name in key]), {})


def encode_keys(batch: pa.RecordBatch, where: str) -> TokenTable:
    """A byte string for each row, which is equal for equal keys only.

    Args:
        batch: the key columns, without nulls: they are written as empty texts are.
        where: names the table, in an error.

    Raises:
        KeyColumnError: a column is of a type that can't be compared.
    """
    check_key_types(batch.schema, tuple(batch.schema.names), where)
    parts = []
    for values in batch.columns:
        column = _as_bytes(values)
        if batch.num_columns > 1:  # lengths, so that ("a", "bc") isn't ("ab", "c")
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
    """Raises `pa.ArrowException` for kinds that can't be compared, such as lists."""
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


def _check_nulls(rows_file: Path, key: tuple[str, ...], where: str) -> None:
    for name in key:
        first: list[int] = []
        num_nulls, start = 0, 0
        for batch in _read(rows_file, (name,)):
            column = batch.column(0)
            if column.null_count:
                nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) + start
                first += nulls[: _MAX_NAMED - len(first)].tolist()
                num_nulls += len(nulls)
            start += batch.num_rows
        if num_nulls:
            raise KeyColumnError(
                f"{where}: key column {name!r} is null in {num_nulls} rows, such as row"
                f" {', '.join(map(str, first))} (counted from 0); fill it in the table, or choose"
                " another key"
            )


def _check_repeats(
    rows_file: Path, key: tuple[str, ...], where: str, ranked: RankedPrompts
) -> None:
    starts_repeat = ranked.is_repeat[1:] & ~ranked.is_repeat[:-1]
    repeated = np.sort(ranked.prompt_idxs[:-1][starts_repeat])  # where each occurs first
    if len(repeated) == 0:
        return
    named = ", ".join(_names(rows_file, key, repeated[:_MAX_NAMED].tolist()))
    num_more = len(repeated) - _MAX_NAMED
    more = f" and {num_more} more" if num_more > 0 else ""
    raise KeyColumnError(
        f"{where}: key ({', '.join(key)}) isn't unique: {named}{more} occur more than once; add"
        " columns to input.key that tell the rows apart, or remove the copies"
    )


def _names(rows_file: Path, key: tuple[str, ...], row_idxs: list[int]) -> list[str]:
    """The keys of some rows, ascending, for an error's message."""
    names: list[str] = []
    start = 0
    for batch in _read(rows_file, key):
        for idx in row_idxs:
            if start <= idx < start + batch.num_rows:
                names.append(" / ".join(shown_key(column[idx - start]) for column in batch.columns))
        start += batch.num_rows
    return names


def shown_key(value: pa.Scalar) -> str:
    """One column's value of a key, for an error's message."""
    shown = repr(_in_python(value))
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def key_texts(batch: pa.RecordBatch, idx: int, key: tuple[str, ...]) -> dict[str, str]:
    """One row's key, as a report has it."""
    return {name: str(_in_python(batch.column(name)[idx])) for name in key}


def _in_python(value: pa.Scalar) -> object:
    """Of what Python can't hold, such as nanoseconds: what is stored."""
    try:
        return value.as_py()
    except (ValueError, OverflowError, KeyError):  # KeyError: an unknown time zone
        if isinstance(value, pa.DictionaryScalar | pa.ExtensionScalar):
            return _in_python(value.value)
        if isinstance(value, pa.TimestampScalar | pa.DurationScalar | pa.Time64Scalar):
            return value.value
        if any(is_bytes(value.type) for is_bytes in _BYTES):  # text that isn't UTF-8
            return value.cast(pa.binary()).as_py()
        return value.cast(pa.string()).as_py()  # a date beyond the year 9999
