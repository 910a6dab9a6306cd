"""What scans of all formats share: conditions on rows, and read errors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal, DecimalException
from functools import reduce
from operator import and_, or_
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as pds
from pyarrow import types
from pyarrow.fs import LocalFileSystem

from batchllm_operator.errors import StorageError, TableError
from batchllm_operator.lake.places import Place, find_place
from batchllm_operator.spec import Comparison, FilterTerm
from batchllm_operator.storage.failures import storage_errors

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
    (types.is_date32, (date,)),
)
"""Types of columns whose bounds are used, and the classes of bounds."""
_PARQUET: Final = pds.ParquetFileFormat()


@dataclass(frozen=True, slots=True)
class Scan:
    """What is read of each file of a snapshot."""

    places: Mapping[str, Place]
    """The wanted values by name."""
    schema: pa.Schema
    """The columns that hold them, and those of conditions."""
    conditions: Sequence[FilterTerm]
    condition: pds.Expression | None
    """All of them, on rows of `schema`."""

    @classmethod
    def of(
        cls, uri: str, table: pa.Schema, columns: Sequence[str], conditions: Sequence[FilterTerm]
    ) -> Scan:
        """A scan of a table with the columns `table`; raises as `LakeTable.scan`."""
        places = {name: find_place(table, name) for name in columns}
        found = {name: place for name, place in places.items() if place is not None}
        compared = [each.column for term in conditions for each in term.comparisons]
        for what, names, known in (
            ("column", list(places), list(found)),
            ("filter column", compared, table.names),
        ):
            if absent := [name for name in names if name not in known]:
                raise TableError(
                    f"table {uri}: there is no {what} {absent[0]!r}; the table has"
                    f" {listed_columns(table)}"
                )
        wanted = dict.fromkeys([*(place.column for place in found.values()), *compared])
        schema = pa.schema([table.field(name) for name in wanted])
        condition = row_condition(f"input.filter: table {uri}", conditions, schema)
        return cls(found, schema, conditions, condition)

    def chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted values of rows that have the columns of `schema`."""
        if not self.places:
            return batch.select([])  # keeps the number of rows
        columns = [place.of(batch) for place in self.places.values()]
        fields = [place.field(batch.schema, name) for name, place in self.places.items()]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def may_match(self, lowest: Mapping[str, Any], highest: Mapping[str, Any]) -> bool:
        """Whether a file may have wanted rows, by bounds of its columns' values."""
        if not self.conditions or not lowest:
            return True
        known = pds.scalar(True)
        for term in self.conditions:
            # Bounds say nothing of null and NaN, which may meet the other operations.
            if {each.op for each in term.comparisons} & {"!=", "not in", "is null"}:
                continue
            for name in {each.column for each in term.comparisons}:
                kind, column = self.schema.field(name).type, pds.field(name)
                classes = next((classes for is_such, classes in _BOUNDED if is_such(kind)), ())
                low, high = lowest.get(name), highest.get(name)
                are_bounds = {type(low), type(high)} <= {*classes}
                if are_bounds and low == low and high == high:  # NaN is Spark's greatest number
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
    where: str, conditions: Sequence[FilterTerm], schema: pa.Schema
) -> pds.Expression | None:
    """All conditions as one expression on rows of `schema`; None without conditions.

    Raises `TableError`: a column's type doesn't allow a condition's comparison; `where` names the
    spec's field and the table.
    """
    nothing, whole = schema.empty_table(), []
    for term in conditions:
        parts = []
        for each in term.comparisons:
            kind = schema.field(each.column).type
            try:
                parts.append(_expression(each, kind))
                nothing.filter(parts[-1])  # else refused only once a file has rows
            except (pa.ArrowException, OverflowError, ValueError, DecimalException) as error:
                value = list(each.value) if isinstance(each.value, tuple) else each.value
                raise TableError(
                    f"{where}: column {each.column!r} holds {kind}, which can't be compared with"
                    f" {each.op} {value!r}; compare it with a value of its own type, or add, in a"
                    " view of the input, a column of text, numbers or booleans"
                ) from error
        whole.append(reduce(or_, parts))
    return reduce(and_, whole) if whole else None


def rows_meeting(
    where: str, conditions: Sequence[FilterTerm], rows: pa.RecordBatch
) -> npt.NDArray[np.bool_]:
    """Which rows meet all conditions, as a scan has them: [num_rows]; raises as `row_condition`."""
    meets = np.ones(rows.num_rows, dtype=np.bool_)
    names = list(dict.fromkeys(each.column for term in conditions for each in term.comparisons))
    if names:
        some, number = rows.select(names), f"number of {''.join(names)}"  # a name that is free
        numbered = some.append_column(number, pa.array(np.arange(rows.num_rows)))
        kept = numbered.filter(row_condition(where, conditions, some.schema)).column(number)
        meets[:] = False
        meets[kept.to_numpy()] = True
    return meets


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


def _expression(term: Comparison, kind: pa.DataType) -> pds.Expression:
    field = pds.field(term.column)
    if term.op in ("is null", "is not null"):
        return field.is_null() if term.op == "is null" else field.is_valid()
    if isinstance(term.value, tuple):  # of in and not in
        is_in = field.isin([_comparable(value, kind) for value in term.value])
        return is_in if term.op == "in" else ~is_in
    return _COMPARISONS[term.op](field, _comparable(term.value, kind))


def _comparable(value: Any, kind: pa.DataType) -> Any:
    """A spec's value in the type of a column; raises `ValueError`, `DecimalException`."""
    if types.is_decimal(kind) and not isinstance(value, bool):
        return Decimal(str(value))
    if not isinstance(value, str):
        return value
    if types.is_date(kind):
        return date.fromisoformat(value)
    if types.is_time(kind):
        return time.fromisoformat(value)
    if types.is_timestamp(kind):
        moment = datetime.fromisoformat(value)
        if kind.tz is None and moment.tzinfo is not None:
            raise ValueError(f"{value} has a time zone, the column has none")
        return moment if kind.tz is None or moment.tzinfo else moment.replace(tzinfo=UTC)
    return value
