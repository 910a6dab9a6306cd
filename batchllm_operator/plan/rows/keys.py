"""Checks that keys are unique, by their digests: the keys themselves may not fit into memory."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import KeyColumnError
from batchllm_operator.lake.row_stream import read_batches
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.shards.reuse_index import FINGERPRINT_DTYPE, fingerprints_of
from batchllm_operator.stored_plan.row_keys import encode_keys, shown_key

_ENCODED_BYTES: Final = 4 << 20  # keys at a time; encoding takes four times as much
MAX_NAMED: Final = 10


def check_keys(rows_file: Path, key: tuple[str, ...], where: str) -> None:
    """Check that each row of a local Parquet file has a key, and no two the same.

    Raises `KeyColumnError`: names up to ten offenders, and the table by `where`.
    """
    nulls, start = NullKeys(key), 0
    digests = [np.zeros(0, dtype=FINGERPRINT_DTYPE)]
    for batch in _read(rows_file, key):
        nulls.add(batch, start)
        start += batch.num_rows
        num_rows = max(1, batch.num_rows * _ENCODED_BYTES // max(1, batch.nbytes))
        for first in range(0, batch.num_rows, num_rows):
            digests.append(fingerprints_of(encode_keys(batch.slice(first, num_rows), where)))
    nulls.check(where)
    repeated = _repeated_rows(np.concatenate(digests))
    if len(repeated):
        names = named_keys(_read(rows_file, key), 0, repeated[:MAX_NAMED].tolist())
        raise repeated_keys(list(names), len(repeated), key, where)


class NullKeys:
    """Rows whose key is null.

    Attributes:
        counts: by key column.
        first: the first rows of each column, at most ten.
    """

    def __init__(self, key: Sequence[str]) -> None:
        self.counts = dict.fromkeys(key, 0)
        self.first: dict[str, list[int]] = {name: [] for name in key}

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Count the nulls of the next rows, the first of which is `first_row`."""
        for name in self.counts:
            if (column := batch.column(name)).null_count:
                rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) + first_row
                self.note(name, len(rows), rows[:MAX_NAMED].tolist())

    def note(self, name: str, num: int, rows: Sequence[int]) -> None:
        """Count nulls of a column; `rows` are the first that have one."""
        self.counts[name] += num
        self.first[name] += rows[: MAX_NAMED - len(self.first[name])]

    def check(self, where: str) -> None:
        """Raise `KeyColumnError` for the first column with nulls."""
        for name, num in self.counts.items():
            if num:
                raise KeyColumnError(
                    f"{where}: key column {name!r} is null in {counted(num, 'row')}, such as row"
                    f" {', '.join(map(str, self.first[name]))} (counted from 0); fill it in the"
                    " table, or choose another key"
                )


def repeated_keys(
    names: Sequence[str], num_repeated: int, key: tuple[str, ...], where: str
) -> KeyColumnError:
    """The error for keys that occur more than once; `names` are the first of them."""
    named = ", ".join(names)
    num_more = num_repeated - len(names)
    more = f" and {num_more} more" if num_more > 0 else ""
    return KeyColumnError(
        f"{where}: key ({', '.join(key)}) isn't unique, as it repeats {named}{more}; add columns"
        " to input.key that tell the rows apart, or remove the copies"
    )


def named_keys(
    batches: Iterable[pa.RecordBatch], first_row: int, rows: Sequence[int]
) -> Iterator[str]:
    """The keys of some rows, ascending, for errors; `first_row` is the first of all batches."""
    for batch in batches:
        for idx in rows:
            if first_row <= idx < first_row + batch.num_rows:
                yield " / ".join(shown_key(column[idx - first_row]) for column in batch.columns)
        first_row += batch.num_rows


def _repeated_rows(digests: npt.NDArray[np.bytes_]) -> Int64s:
    """The first rows of all keys that occur again, ascending."""
    order = np.argsort(digests, kind="stable")  # equal keys stay in the order of their rows
    is_repeat = np.zeros(len(order) + 1, dtype=np.bool_)
    is_repeat[1:-1] = digests[order[1:]] == digests[order[:-1]]
    return np.sort(order[is_repeat[1:] & ~is_repeat[:-1]])


def _read(rows_file: Path, key: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The key columns, in the order of `key`, in small batches."""
    stored = pq.read_schema(rows_file)
    with rows_file.open("rb") as file:
        yield from read_batches(file, pa.schema([stored.field(name) for name in key]), {})
