"""What publishing a partition has in common for all formats: when it is done, and when to go on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from batchllm_operator.errors import CommitUnknownError, ConflictError, StorageError, TableError
from batchllm_operator.lake.table import Publication

RUN_ID = "run_id"
"""Column that says whose outputs a row is among."""


def check_name(uri: str, partition: str) -> None:
    """Refuse a partition that no reader of the table could name.

    Raises:
        TableError: its name is empty.
    """
    if not partition:
        raise TableError(f"output {uri}: a partition needs a name, such as 2026-01-31")


def publisher_in(
    uri: str, partition: str, columns: pa.Schema, rows: Iterable[pa.RecordBatch]
) -> Publication | None:
    """Whose outputs the rows of a partition are; None if there are none.

    `columns` are the table's. Of `rows`, the first column is `run_id`, if the table has it.

    Raises:
        TableError: rows that no job of this package wrote.
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
    """Whether the partition holds what is wanted already; if not, it holds `replaces`.

    Raises:
        ConflictError: it holds something else.
    """
    if found == wanted:
        return True
    if found == replaces:
        return False
    there, expected = (each.run_id if each else "nothing" for each in (found, replaces))
    raise ConflictError(
        f"output {uri}: partition {wanted.partition!r} holds {there} where {expected} was expected:"
        f" somebody else has published it meanwhile; {wanted.run_id} wasn't published"
    )


@contextmanager
def looking_again(uri: str, partition: str, *, is_open: bool = True) -> Iterator[None]:
    """While the outcome of a commit is open, a table that can't be read leaves it so.

    Raises:
        CommitUnknownError: the table can't be read.
    """
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
    """Seconds to wait before further tries: ever more, and not in step with other writers."""
    for idx in range(num_pauses):
        yield random.uniform(0.5, 1.0) * min(first_s * 2**idx, longest_s)


def _values(column: pa.Array) -> set[Any]:
    """The values of a column; bytes if one, written by another program, isn't UTF-8."""
    distinct = column.unique()
    try:
        return set(distinct.to_pylist())
    except UnicodeDecodeError:
        return set(distinct.cast(pa.binary()).to_pylist())
