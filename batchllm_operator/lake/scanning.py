"""What scans of all formats share: conditions on rows, and the errors of reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.dataset as pds

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.spec import FilterTerm


def check_columns(
    uri: str, schema: pa.Schema, columns: Sequence[str], conditions: Sequence[FilterTerm]
) -> None:
    """Refuse columns that the table `uri` lacks.

    Raises:
        TableError: names the first, and those that there are.
    """
    for what, names in (("column", columns), ("filter column", [c.column for c in conditions])):
        for name in names:
            if name not in schema.names:
                raise TableError(
                    f"table {uri}: there is no {what} {name!r}; the table has"
                    f" {', '.join(schema.names)}"
                )


def row_condition(conditions: Sequence[FilterTerm], schema: pa.Schema) -> pds.Expression | None:
    """All conditions as one on rows of `schema`; None if there are none.

    Raises:
        pa.ArrowException, OverflowError: a column can't be compared as a condition asks.
    """
    if not conditions:
        return None
    condition = reduce(and_, map(_expression, conditions))
    schema.empty_table().filter(condition)  # a file without rows wouldn't refuse it
    return condition


@contextmanager
def reading(uri: str, partition: str, file: str | None = None) -> Iterator[None]:
    """Turn what goes wrong while data of a partition are read into this package's errors.

    Args:
        uri: the table's.
        partition: which one is read.
        file: name of the file that is read, if it is one.

    Raises:
        TableError: a file vanished or is damaged, or a condition can't be applied.
        StorageError: the storage fails.
    """
    from botocore.exceptions import BotoCoreError  # s3fs lets these through; slow to import

    where = f"table {uri}: " + (file or f"partition {partition!r}")
    try:
        yield
    except FileNotFoundError as error:
        raise TableError(
            f"table {uri}: a file of partition {partition!r} vanished while it was read: {error}"
        ) from error
    except (pa.ArrowException, OverflowError, OSError, BotoCoreError) as error:
        # Arrow says OSError for damaged data too, without the errno of a real one.
        is_storage = isinstance(error, BotoCoreError) or getattr(error, "errno", None)
        kind = StorageError if is_storage else TableError
        raise kind(f"{where} can't be read: {' '.join(str(error).split())}") from error


def _expression(term: FilterTerm) -> pds.Expression:
    field = pds.field(term.column)
    match term.op:
        case "in":
            return field.isin(list(_values(term)))
        case "not in":
            return ~field.isin(list(_values(term)))
        case "==":
            return field == term.value
        case "!=":
            return field != term.value
        case "<":
            return field < term.value
        case "<=":
            return field <= term.value
        case ">":
            return field > term.value
        case ">=":
            return field >= term.value


def _values(term: FilterTerm) -> tuple[str | int | float | bool, ...]:
    assert isinstance(term.value, tuple)  # the spec checks it
    return term.value
