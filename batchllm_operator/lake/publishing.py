"""What all formats share in publishing a partition: checks of its state, and pauses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from batchllm_operator.errors import CommitUnknownError, ConflictError, StorageError, TableError
from batchllm_operator.lake.table import Publication

RUN_ID = "run_id"
"""The column that names a row's publication."""


def check_name(uri: str, partition: str) -> None:
    """Raise `TableError` if the partition's name is empty: no reader could name it."""
    if not partition:
        raise TableError(f"output {uri}: a partition needs a name, such as 2026-01-31")


def publisher_in(
    uri: str, partition: str, columns: pa.Schema, rows: Iterable[pa.RecordBatch]
) -> Publication | None:
    """The publication that a partition's rows belong to; None without rows.

    `columns` are the table's. The first column of `rows` is `run_id`, if the table has it.

    Raises:
        TableError: no job of this package wrote the rows.
    """
    run_ids: set[Any] = set()
    for batch in rows:
        run_ids |= _values(batch.column(0)) if RUN_ID in columns.names else {None}
        if len(run_ids) > 1:
            break
    if not run_ids:
        return None
    run_id = run_ids.pop()
    found = Publication.of_run_id(run_id) if isinstance(run_id, str) and not run_ids else None
    if found is None or found.partition != partition:
        why = "there are several values of" if run_ids else "there is no column"
        if not run_ids and RUN_ID in columns.names:
            why = f"it is {run_id!r} in"
        raise TableError(
            f"output {uri}: partition {partition!r} holds rows that no job of this package wrote;"
            f" move them away or choose another output table ({why} {RUN_ID!r})"
        )
    return found


def is_published(
    uri: str, found: Publication | None, wanted: Publication, replaces: Publication | None
) -> bool:
    """Whether the partition holds `wanted` already; if not, it holds `replaces`.

    Raises:
        ConflictError: it holds neither.
    """
    if found == wanted:
        return True
    if found == replaces:
        return False
    there, expected = (each.run_id if each else "nothing" for each in (found, replaces))
    raise ConflictError(
        f"output {uri}: partition {wanted.partition!r} holds {there} where {expected} was expected:"
        f" another writer has published it meanwhile; {wanted.run_id} wasn't published"
    )


@contextmanager
def looking_again(uri: str, partition: str, *, is_open: bool = True) -> Iterator[None]:
    """Turn a failed read into `CommitUnknownError` if a commit's outcome is open (`is_open`)."""
    try:
        yield
    except StorageError as error:
        if not is_open:
            raise
        raise CommitUnknownError(
            f"output {uri}: no answer came whether partition {partition!r} was published, and the"
            f" table can't be read; commit again to find out: {error}"
        ) from error


def pauses_s(first_s: float, longest_s: float, num_pauses: int) -> Iterator[float]:
    """Pauses between commits: exponential, with jitter so that writers don't stay in step."""
    for idx in range(num_pauses):
        yield random.uniform(0.5, 1.0) * min(first_s * 2**idx, longest_s)


def _values(column: pa.Array) -> set[Any]:
    """The column's distinct values; bytes if another program wrote one that isn't UTF-8."""
    distinct = column.unique()
    try:
        return set(distinct.to_pylist())
    except UnicodeDecodeError:
        return set(distinct.cast(pa.binary()).to_pylist())
