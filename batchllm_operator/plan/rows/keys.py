"""Checks that keys are unique, by their digests: the keys themselves may not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import KeyColumnError
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.shards.reuse_index import FINGERPRINT_DTYPE, fingerprints_of
from batchllm_operator.stored_plan.row_keys import encode_keys, shown_key

_ENCODED_BYTES: Final = 4 << 20  # keys at a time; encoding takes four times as much
MAX_NAMED: Final = 10


def check_keys(rows_file: Path, key: tuple[str, ...], where: str) -> None:
    """Check that each row has a key, and no two the same.

    Args:
        rows_file: local Parquet file with the key columns.
        key: their names.
        where: the table's name in errors.

    Raises:
        KeyColumnError: names up to ten offenders.
    """
    _check_nulls(rows_file, key, where)
    repeated = _repeated_rows(rows_file, key, where)
    if len(repeated) == 0:
        return
    raise repeated_keys(
        _names(rows_file, key, repeated[:MAX_NAMED].tolist()), len(repeated), key, where
    )


def repeated_keys(
    names: Sequence[str], num_repeated: int, key: tuple[str, ...], where: str
) -> KeyColumnError:
    """The error for keys that occur more than once; `names` are the first of them."""
    named = ", ".join(names)
    num_more = num_repeated - len(names)
    more = f" and {num_more} more" if num_more > 0 else ""
    return KeyColumnError(
        f"{where}: key ({', '.join(key)}) isn't unique: {named}{more} occur more than once; add"
        " columns to input.key that tell the rows apart, or remove the copies"
    )


def _repeated_rows(rows_file: Path, key: tuple[str, ...], where: str) -> npt.NDArray[np.int64]:
    """The first rows of all keys that occur again, ascending."""
    found = [np.zeros(0, dtype=FINGERPRINT_DTYPE)]
    for batch in _read(rows_file, key):
        num_rows = max(1, batch.num_rows * _ENCODED_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, num_rows):
            found.append(fingerprints_of(encode_keys(batch.slice(start, num_rows), where)))
    digests = np.concatenate(found)
    order = np.argsort(digests, kind="stable")  # equal keys stay in the order of their rows
    is_repeat = np.zeros(len(order) + 1, dtype=np.bool_)
    is_repeat[1:-1] = digests[order[1:]] == digests[order[:-1]]
    return np.sort(order[is_repeat[1:] & ~is_repeat[:-1]])


def _read(rows_file: Path, key: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The key columns, in the order of `key`, in small batches."""
    stored = pq.read_schema(rows_file)
    with rows_file.open("rb") as file:
        yield from read_batches(file, pa.schema([stored.field(name) for name in key]), {})


def _check_nulls(rows_file: Path, key: tuple[str, ...], where: str) -> None:
    for name in key:
        first: list[int] = []
        num_nulls, start = 0, 0
        for batch in _read(rows_file, (name,)):
            column = batch.column(0)
            if column.null_count:
                nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) + start
                first += nulls[: MAX_NAMED - len(first)].tolist()
                num_nulls += len(nulls)
            start += batch.num_rows
        if num_nulls:
            raise null_keys(name, num_nulls, first, where)


def null_keys(name: str, num_nulls: int, first: Sequence[int], where: str) -> KeyColumnError:
    """The error for a key column with nulls; `first` are the first rows that have one."""
    return KeyColumnError(
        f"{where}: key column {name!r} is null in {counted(num_nulls, 'row')}, such as row"
        f" {', '.join(map(str, first))} (counted from 0); fill it in the table, or choose"
        " another key"
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
