"""What scans of all formats share: conditions on rows, and read errors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as pds
from pyarrow import types
from pyarrow.fs import LocalFileSystem

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.spec import FilterTerm
from batchllm_operator.storage.s3 import storage_errors

_MAX_NAMED: Final = 30  # columns
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], pds.Expression]]] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le},
    **{">": operator.gt, ">=": operator.ge},
}
_BOUNDED: Final[Sequence[tuple[Callable[[pa.DataType], bool], tuple[type, ...]]]] = (
    (types.is_integer, (int,)),
    (types.is_float64, (int, float)),
    (types.is_string, (str,)),
    (types.is_boolean, (bool,)),
)
"""Types of columns whose bounds are used, and the classes of bounds."""
_PARQUET: Final = pds.ParquetFileFormat()


@dataclass(frozen=True, slots=True)
class Scan:
    """What is read of each file of a snapshot."""

    schema: pa.Schema
    """The wanted columns, and those of conditions."""
    conditions: Sequence[FilterTerm]
    condition: pds.Expression | None
    """All of them, on rows of `schema`."""

    @classmethod
    def of(
        cls, uri: str, table: pa.Schema, columns: Sequence[str], conditions: Sequence[FilterTerm]
    ) -> Scan:
        """A scan of a table with the columns `table`; raises as `LakeTable.scan`."""
        for what, names in (("column", columns), ("filter column", [c.column for c in conditions])):
            for name in names:
                if name not in table.names:
                    raise TableError(
                        f"table {uri}: there is no {what} {name!r}; the table has"
                        f" {listed_columns(table)}"
                    )
        wanted = dict.fromkeys([*columns, *(term.column for term in conditions)])
        schema = pa.schema([table.field(name) for name in wanted])
        return cls(schema, conditions, row_condition(uri, conditions, schema))

    def may_match(self, lowest: Mapping[str, Any], highest: Mapping[str, Any]) -> bool:
        """Whether a file may have wanted rows, by bounds of its columns' values."""
        if not self.conditions or not lowest:
            return True
        known = pds.scalar(True)
        for term in self.conditions:
            kind, column = self.schema.field(term.column).type, pds.field(term.column)
            classes = next((classes for is_such, classes in _BOUNDED if is_such(kind)), ())
            low, high = lowest.get(term.column), highest.get(term.column)
            are_bounds = {type(low), type(high)} <= {*classes}
            are_bounds = are_bounds and low == low and high == high  # NaN, Spark's greatest number
            # Bounds say nothing of null and NaN, which may meet the other two.
            if are_bounds and term.op not in ("!=", "not in"):
                known &= (column >= low) & (column <= high)
        disk = LocalFileSystem()  # nothing is opened
        file = _PARQUET.make_fragment("", disk, partition_expression=known)
        files = pds.FileSystemDataset([file], self.schema, _PARQUET, disk)
        try:
            return any(True for _ in files.get_fragments(self.condition))
        except (pa.ArrowException, OverflowError):
            return True  # some values are compared with rows, but not with bounds


def listed_columns(schema: pa.Schema) -> str:
    """The columns' names for an error message, shortened."""
    shown = [name if name.isprintable() else repr(name) for name in schema.names[:_MAX_NAMED]]
    more = len(schema.names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def row_condition(
    uri: str, conditions: Sequence[FilterTerm], schema: pa.Schema
) -> pds.Expression | None:
    """All conditions as one expression on rows of `schema`; None without conditions.

    Raises `TableError`: a column's type doesn't allow a condition's comparison.
    """
    nothing = schema.empty_table()
    for term in conditions:
        try:
            nothing.filter(_expression(term))  # else refused only once a file has rows
        except (pa.ArrowException, OverflowError) as error:
            value = list(term.value) if isinstance(term.value, tuple) else term.value
            raise TableError(
                f"input.filter: column {term.column!r} of table {uri} holds"
                f" {schema.field(term.column).type}, which can't be compared with {term.op}"
                f" {value!r}; compare it with a value of its own type, or add a column of text,"
                " numbers or booleans in a view of the input, and filter by that"
            ) from error
    return reduce(and_, map(_expression, conditions)) if conditions else None


@contextmanager
def reading(uri: str, partition: str, file: str | None = None) -> Iterator[None]:
    """Turn errors while reading a partition's data into this package's errors."""
    where = f"table {uri}: " + (file or f"partition {partition!r}")
    try:
        yield
    except FileNotFoundError as error:
        raise TableError(
            f"table {uri}: a file of partition {partition!r} vanished while it was read, or since"
            f" its version was looked at, as after a vacuum; plan again: {error}"
        ) from error
    except (
        *(pa.ArrowException, OverflowError, *storage_errors()),
        UnicodeDecodeError,  # of a column's name
    ) as error:
        # Arrow raises OSError for damaged data too, but without an errno.
        is_storage = isinstance(error, storage_errors()) and getattr(error, "errno", True)
        kind = StorageError if is_storage else TableError
        advice = "" if is_storage else "; write it again, or change what is asked of it"
        raise kind(f"{where} can't be read: {' '.join(str(error).split())}{advice}") from error


def _expression(term: FilterTerm) -> pds.Expression:
    field = pds.field(term.column)
    if term.op in ("in", "not in"):
        assert isinstance(term.value, tuple)  # the spec checks it
        is_in = field.isin(list(term.value))
        return is_in if term.op == "in" else ~is_in
    return _COMPARISONS[term.op](field, term.value)
