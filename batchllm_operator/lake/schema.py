"""Whether rows fit a table: columns, their types to a table format, and values that it can keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchllm_operator.errors import TableError

_ALIKE: Final = (
    *(types.is_boolean, types.is_int32, types.is_int64, types.is_float32, types.is_float64),
    *(types.is_string, types.is_binary, types.is_date32),
)
_MOST_DIGITS: Final = 38  # of decimals


@dataclass(frozen=True, slots=True)
class FormatTypes:
    """What a table format can hold: microseconds, UTC, dates of 32 bits, decimals of 38 digits."""

    format_name: str
    others: Mapping[pa.DataType, pa.DataType]
    """The format's types for those that not all formats hold alike."""
    has_fixed_binary: bool
    has_calendar: bool
    """Whether its statistics know dates of the years 1 to 9999 only."""

    def store(self, kind: pa.DataType) -> pa.DataType | None:
        """The format's type for a plain one without parts; None if there is none."""
        if any(is_such(kind) for is_such in _ALIKE):
            return kind
        if types.is_timestamp(kind):
            return pa.timestamp("us", None if kind.tz is None else "UTC")
        if types.is_date(kind):
            return pa.date32()
        if types.is_decimal(kind) and kind.scale <= _MOST_DIGITS:
            return pa.decimal128(min(kind.precision, _MOST_DIGITS), kind.scale)
        if types.is_fixed_size_binary(kind):
            return kind if self.has_fixed_binary else pa.binary()
        return self.others.get(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type as a table format knows it.

    Arrow's memory layout (dictionaries, large offsets, fixed list sizes), names of list elements
    and nullability don't count; JSON is text.
    """
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind) or isinstance(kind, pa.JsonType):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    return nested_type(kind, plain_type) or kind


def nested_type(
    kind: pa.DataType,
    convert: Callable[[pa.DataType], pa.DataType],
    name: Callable[[pa.Field], str] = lambda field: field.name,
) -> pa.DataType | None:
    """A list, map or struct with its parts converted, fields named; None for any other type."""
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(convert(kind.value_type))
    if types.is_map(kind):
        return pa.map_(convert(kind.key_type), convert(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([(name(field), convert(field.type)) for field in kind])
    return None


def stored_schema(where: str, rows: pa.Schema, kinds: FormatTypes) -> pa.Schema:
    """The columns of `rows` in a format's types; raises `TableError` where it has none."""

    def stored(kind: pa.DataType) -> pa.DataType:
        plain = plain_type(kind)
        if types.is_null(plain):
            return plain
        if (result := kinds.store(plain) or nested_type(plain, stored)) is None:
            raise TypeError
        return result

    fields = []
    for field in rows:
        try:
            fields.append((field.name, stored(field.type)))
        except TypeError:
            raise TableError(
                f"{where}: column {field.name!r} holds {field.type}, which {kinds.format_name} has"
                " no type for; cast it in a view of the input"
            ) from None
    return pa.schema(fields)


def holds(kind: pa.DataType, is_such: Callable[[pa.DataType], bool]) -> bool:
    """Whether the type, or a part of it at any level, is such a type."""
    return is_such(kind) or any(
        holds(kind.field(idx).type, is_such) for idx in range(kind.num_fields)
    )


def merge_schemas(where: str, schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """One schema for a partition's files, with the wider of two compatible types.

    All columns may be null: a file may lack one. Raises `TableError` where files don't fit.
    """
    merged = pa.schema([])
    for file, schema in schemas.items():
        if repeated := [name for name in schema.names if schema.names.count(name) > 1]:
            raise TableError(
                f"{where}: {file} has {schema.names.count(repeated[0])} columns named"
                f" {repeated[0]!r}; rename all but one"
            )
        try:
            merged = _unified(merged, schema)
        except pa.ArrowException as error:
            raise TableError(f"{where}: {_disagreement(schemas, file)}") from error
    return pa.schema([field.with_nullable(True) for field in merged])


def _unified(*schemas: pa.Schema) -> pa.Schema:
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException:  # also of a dictionary and its values, which one writer may mix
        plain = [pa.schema([f.with_type(plain_type(f.type)) for f in s]) for s in schemas]
        return pa.unify_schemas(plain, promote_options="permissive")


def _disagreement(schemas: Mapping[str, pa.Schema], file: str) -> str:
    """Names a column of `file`, and the first file whose type of it differs too much."""
    for other, schema in schemas.items():
        for field in schemas[file]:
            if field.name not in schema.names:
                continue
            known = schema.field(field.name)
            try:
                _unified(pa.schema([known]), pa.schema([field]))
            except pa.ArrowException:
                return (
                    f"column {field.name!r} holds {known.type} in {other}, but {field.type} in"
                    f" {file}; write one of them again, with the type of the other"
                )
    return f"{file} doesn't fit the types of the files before it together; write it again"


def check_names(where: str, columns: Sequence[pa.Field], forbidden: str, place: str = "") -> None:
    """Raise `TableError` for a name that is empty, has such a character or differs by case only.

    Fields inside columns count; `place` begins their full names.
    """
    known: set[str] = set()
    for field in columns:
        name, kind = f"{place}{field.name}", field.type
        if not field.name:
            raise TableError(f"{where}: there is a field without a name in {place[:-1]!r}")
        if characters := sorted(set(field.name) & set(forbidden)):
            raise TableError(
                f"{where}: the name {name!r} has {', '.join(map(repr, characters))}, which"
                " the table's format doesn't allow in names; rename it"
            )
        if field.name.casefold() in known:
            raise TableError(
                f"{where}: two fields {name!r} differ by case only, which the table can't hold;"
                " rename one in a view of the input"
            )
        known.add(field.name.casefold())
        while types.is_list(kind):
            kind = kind.value_type
        if types.is_struct(kind):
            check_names(where, list(kind), forbidden, f"{name}.")


def check_fit(where: str, table: pa.Schema, rows: pa.Schema, *, add_columns: bool) -> list[str]:
    """Names of the columns that `rows` would add to the table, whose columns are `table`.

    Columns that only the table has become null; those of type null always fit. `where` names the
    table in errors.

    Raises `TableError`: a column has another type, has nested fields that may not be null, is new
    without `add_columns`, or differs from one of the table's by case only.
    """
    known = {name.casefold(): name for name in table.names}
    for field in rows:
        if field.name not in table.names:
            if other := known.get(field.name.casefold()):
                raise TableError(
                    f"{where}: the job's column {field.name!r} differs from {other!r} by case only,"
                    " which few readers tell apart; rename it in a view of the input"
                )
            continue
        theirs, ours = plain_type(table.field(field.name).type), plain_type(field.type)
        if theirs != ours and pa.null() not in (theirs, ours):
            raise TableError(
                f"{where}: column {field.name!r} holds {theirs}, the job's outputs {ours};"
                " give the job an output table of its own, or rename the column in a view of the"
                " input"
            )
        if _has_required_parts(table.field(field.name).type):
            raise TableError(
                f"{where}: column {field.name!r} has parts that may not be null, which isn't"
                " checked for parts; give the job an output table of its own"
            )
    new = [name for name in rows.names if name not in table.names]
    if new and not add_columns:
        raise TableError(
            f"{where}: has no column {new[0]!r}"
            + (f" nor {', '.join(map(repr, new[1:]))}" if new[1:] else "")
            + "; set output.add_columns to true to add it, plan again and commit: finished parts"
            " are kept"
        )
    return new


def fit_columns(
    where: str,
    column: str,
    rows: pa.Schema,
    table: pa.Schema | None,
    kinds: FormatTypes,
    *,
    add_columns: bool,
) -> tuple[StoredColumns, pa.Schema]:
    """The columns of `rows` as the table has, or will have, them; and those that it lacks.

    Args:
        where: names the table in errors.
        column: the partition column.
        table: the table's columns; None before there is one.

    Raises `TableError`: they don't fit; see also `check_names`, `stored_schema` and `check_fit`.
    """
    if column in rows.names:
        raise TableError(f"{where}: the rows have the partition column {column!r} themselves")
    check_names(where, [pa.field(column, pa.string()), *rows], "\0")
    stored = stored_schema(where, rows, kinds)
    new, known = stored, {field.name: field for field in stored}
    if table is not None:
        names = check_fit(where, table, stored, add_columns=add_columns)
        new = pa.schema([stored.field(name) for name in names])
        for field in table:
            if not field.nullable and field.name not in (*rows.names, column):
                raise TableError(
                    f"{where}: column {field.name!r} may not be null, and the job doesn't write it"
                )
        known |= {field.name: field for field in table if field.name in known}
    for field in new:
        if types.is_null(field.type):
            raise TableError(
                f"{where}: no row has a value in a new column, {field.name!r}, so it has no type;"
                " cast it in a view of the input, or leave it out of output.carry"
            )
    # Plain types: a table has other names for the parts of lists than a new column.
    columns = [known[name].with_type(plain_type(known[name].type)) for name in stored.names]
    return StoredColumns(where, pa.schema(columns), kinds.has_calendar), new


def _has_required_parts(kind: pa.DataType) -> bool:
    """Whether a nested field may not be null, apart from keys of maps."""
    if types.is_map(kind):
        parts = [kind.item_field]
    else:
        parts = [kind.field(idx) for idx in range(kind.num_fields)]
    return any(not part.nullable or _has_required_parts(part.type) for part in parts)


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
        """Raise `TableError` for the first value that can't be stored, at plan as at commit.

        `rows` have any of the columns, in types that `LakeTable.check_outputs` has accepted;
        `describe` gives a row's key, for errors.
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
    try:  # as pyiceberg does it for its statistics
        pc.min_max(column).as_py()
    except OverflowError:
        return False
    return True
