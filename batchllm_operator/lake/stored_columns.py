"""What a table makes of a job's columns: their types there, and values that it can't keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchllm_operator.errors import TableError
from batchllm_operator.lake.schema import holds, plain_type

_US: Final = 1_000_000
_DAYS: Final = (-719_162, 2_932_896)  # since 1970: 0001-01-01 to 9999-12-31
_PER_SECOND: Final = {"s": 1, "ms": 1_000, "us": _US, "ns": 1_000 * _US}


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """The columns of outputs as a table stores them."""

    where: str
    """Names the table in errors."""
    schema: pa.Schema
    """Their types in the table, and whether they may be null."""
    has_calendar: bool
    """Whether the format's statistics know dates of the years 1 to 9999 only."""

    def check(
        self,
        rows: pa.RecordBatch,
        first_row: int = 0,
        describe: Callable[[pa.RecordBatch, int], str] | None = None,
    ) -> None:
        """Refuse values that can't be stored; plan and commit apply the same check.

        Args:
            rows: any of the columns, in types that `LakeTable.check_outputs` has accepted.
            first_row: the number of the first row in errors.
            describe: a row's key, for errors.

        Raises:
            TableError: names the column and the first row with such a value.
        """
        for field in self.schema:
            if field.name not in rows.schema.names:
                continue
            column = rows.column(field.name)
            if (fault := self._fault(column, field)) is None:
                continue
            idx = next(i for i in range(len(column)) if self._fault(column.slice(i, 1), field))
            key = "" if describe is None else f", {describe(rows, idx)}"
            raise TableError(
                f"{self.where}: column {field.name!r} {fault} in row {first_row + idx} (counted"
                f" from 0){key}; mend or cast it in a view of the input, or leave it out of"
                " output.carry"
            )

    def _fault(self, column: pa.Array, field: pa.Field) -> str | None:
        if not field.nullable and column.null_count:
            return "may not be null, but is"
        is_dated = self.has_calendar and holds(field.type, _is_date)
        if plain_type(column.type) == plain_type(field.type) and not is_dated:
            return None
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()  # only values that rows have
        if plain_type(column.type) != plain_type(field.type):
            try:
                column = column.cast(field.type)
            except pa.ArrowException:
                return f"has a value that doesn't fit the table's type {field.type}"
        if is_dated and not all(map(_is_in_calendar, _leaves(column))):
            return "has a date outside the years 1 to 9999"
        return None


def _is_date(kind: pa.DataType) -> bool:
    return bool(types.is_date(kind) or types.is_timestamp(kind))


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Its dates and timestamps, also those inside nested values."""
    kind = column.type
    if _is_date(kind):
        yield column
    elif types.is_map(kind):
        yield from _leaves(column.keys)
        yield from _leaves(column.items)
    elif types.is_struct(kind):
        for child in column.flatten():
            yield from _leaves(child)
    elif types.is_nested(kind):
        yield from _leaves(column.flatten())


def _is_in_calendar(column: pa.Array) -> bool:
    kind = column.type
    width = pa.int32() if types.is_date32(kind) else pa.int64()
    per_day = 1
    if not types.is_date32(kind):
        per_day = 86_400 * (1_000 if types.is_date64(kind) else _PER_SECOND[kind.unit])
    bounds = pc.min_max(column.view(width)).as_py()
    first, last = _DAYS
    return bounds["min"] is None or (
        bounds["min"] >= first * per_day and bounds["max"] < (last + 1) * per_day
    )
