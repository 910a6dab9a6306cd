"""What all formats answer when a partition is to be published: done, go on, or a conflict."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from batchllm_operator.errors import CommitUnknownError, ConflictError, StorageError, TableError
from batchllm_operator.lake.table import LakeTable, Publication


def check_name(uri: str, partition: str) -> None:
    """Refuse a partition that no reader of the table could name.

    Raises:
        TableError: its name is empty.
    """
    if not partition:
        raise TableError(f"output {uri}: a partition needs a name, such as 2026-01-31")


def values_of(column: pa.Array) -> set[Any]:
    """The values of a column `run_id`; bytes if one, written by another program, isn't UTF-8."""
    distinct = column.unique()
    try:
        return set(distinct.to_pylist())
    except UnicodeDecodeError:
        return set(distinct.cast(pa.binary()).to_pylist())


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


def has_happened(table: LakeTable, wanted: Publication, replaces: Publication | None) -> bool:
    """The same, by another look at the table after a commit that got no good answer.

    Raises:
        ConflictError: somebody else has published.
        CommitUnknownError: the table can't be read now.
    """
    try:
        found = table.published(wanted.partition)
    except StorageError as error:
        raise CommitUnknownError(
            f"output {table.uri}: no answer came whether partition {wanted.partition!r} was"
            f" published, and the table can't be read; commit again to find out: {error}"
        ) from error
    return is_published(table.uri, found, wanted, replaces)
