"""Checks of an input before its rows are read: columns, partition, lengths."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from batchllm_operator.amounts import counted, first_of
from batchllm_operator.errors import SpecError, TableError
from batchllm_operator.lake import (
    NAME_ONE,
    LakeTable,
    Snapshot,
    find_place,
    listed_columns,
    near,
    open_table,
    row_condition,
)
from batchllm_operator.plan.rounds import answers_schema
from batchllm_operator.prompts import has_messages, has_text
from batchllm_operator.spec import JobSpec, PromptSpec
from batchllm_operator.spec.rounds import compared
from batchllm_operator.stored_plan.row_keys import check_key_types

_MAX_NAMED: Final = 3  # partitions
_IS_A_TIME: Final = re.compile(r"(19|20|21)[0-9]{2}([-_/]?([0-9]{2}|[WwQq][0-9])|$)")
"""Begins with a year, and ends there or goes on with a month, week or quarter, as dates do."""
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_UNITS_OF_TIME: Final = {
    **dict.fromkeys(("year", "yr", "yyyy", "yy", "y"), 0),
    **dict.fromkeys(("quarter", "qtr", "q"), 1),
    **dict.fromkeys(("month", "mon", "mm", "m", "week", "wk", "w"), 2),
    **dict.fromkeys(("date", "dt", "ds", "day", "dd", "d"), 3),
    **dict.fromkeys(("hour", "hr", "hh", "h"), 4),
}
"""By length, the longest first."""
_PLACED: Final = (
    "; only text, numbers, booleans, dates, times and lists of these can be placed: cast it to one"
    " of them in the table"
)
_MESSAGES: Final = (
    "; it must be a list of structs with role and content, without dates or bytes, or such a list"
    " as JSON text"
)
_log = logging.getLogger(__name__)


def _check_others(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Refuse to read, say, the 31st of several months as one partition.

    Columns of other things, such as a region, and of shorter times may have any number of values: a
    partition is in all.

    Raises `SpecError`: names the columns that tell the partitions apart.
    """
    if _IS_A_TIME.match(snapshot.partition) and len(snapshot.partition) > 4:  # not a year alone
        return
    filtered = {term.column for term in spec.input.filter}
    units = [
        unit for name in (table.partition_column, *table.outer) if (unit := _unit(name)) is not None
    ]
    several = [
        f"{column} {first_of([*map(repr, values)], _MAX_NAMED)}"
        for column, values in snapshot.others.items()
        if len(values) > 1
        and column not in filtered
        and _tell_apart(column, values, max(units, default=None))
    ]
    if several:
        raise SpecError(
            f"input.partition_column: table {table.uri} has partition"
            f" {table.partition_column}={snapshot.partition} in {' and '.join(several)}, which"
            " would be read as one; name the columns in input.partition, such as"
            ' {year: "%Y", month: "%m", day: "%d"}, or in input.filter, let input.uri name an outer'
            " folder, or give the table a column that tells them apart, such as ds=2026-01-31"
        )


def _unit(column: str) -> int | None:
    """Of the time that a column's name says; None if it says none."""
    words = map(str.lower, _WORDS.findall(column))
    return min((_UNITS_OF_TIME[word] for word in words if word in _UNITS_OF_TIME), default=None)


def _tell_apart(column: str, values: Sequence[str], own: int | None) -> bool:
    """Whether a column is of longer times than the partition's, of which the unit is `own`."""
    unit = _unit(column)
    if unit is None:
        return all(map(_IS_A_TIME.match, values))
    return own is None or unit < own


def open_input(spec: JobSpec, ds: str) -> tuple[LakeTable, Snapshot]:
    """The input and its partition, as the spec says that it is read.

    Raises as `open_table` and `LakeTable.snapshot`.
    """
    (column, value), *outer = spec.input.places(ds).items()
    table = open_table(spec.input.uri, column)
    table.outer.update(outer)
    table.time_zone = spec.input.partition_timezone
    snapshot = table.snapshot(value)
    if table.time_zone and not pa.types.is_timestamp(kind := snapshot.schema.field(column).type):
        raise SpecError(
            f"input.partition_timezone: is for timestamps that an Iceberg table is partitioned by;"
            f" column {column!r} of table {table.uri} holds {kind}"
        )
    if spec.input.bytes_as_text:
        snapshot = snapshot.with_text()
    return table, snapshot


def check_columns(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Check that the table has every column that the spec names, and needs no other.

    Raises:
        SpecError: one is missing, or can't be a part of a prompt or a length, or tells apart what
            would be read as one partition; names the field.
        KeyColumnError, TableError: a key or filter column can't be compared.
    """
    schema = snapshot.schema
    for name in spec.prompts:
        if name in schema.names:
            raise SpecError(
                f"prompts.{name}: table {table.uri} has a column of that name, and templates"
                " couldn't tell them apart; choose another"
            )
    known = pa.schema([*schema, *answers_schema(spec)])
    for where, question in zip(spec.prompt_fields, spec.questions, strict=True):
        _check_placed(question.prompt, f"{where}.{question.prompt.field}", table, known)
    for name, prompt in spec.prompts.items():
        for column in compared(prompt):
            if column not in known.names:
                raise _absent(f"prompts.{name}.when", column, table, schema)
        row_condition(f"prompts.{name}.when: table {table.uri}", prompt.when, known)
    places = {
        "input.key": spec.input.key,
        "output.carry": spec.output.carry,
        "input.filter": [each.column for term in spec.input.filter for each in term.comparisons],
        "planner.estimated_output_tokens": spec.planner.estimate_columns,
        "model.adapter_column": tuple(filter(None, [spec.model.adapter_column])),
    }
    for place, columns in places.items():
        for column in columns:
            if column not in schema.names:
                raise _absent(place, column, table, schema)
    check_key_types(snapshot.schema, spec.input.key, f"input.key: table {table.uri}")
    row_condition(f"input.filter: table {table.uri}", spec.input.filter, snapshot.schema)
    for place, is_kind, reason in (
        ("model.adapter_column", _is_text, ", not text"),
        ("planner.estimated_output_tokens", pa.types.is_integer, ", not integers"),
    ):
        for column in places[place]:
            if not is_kind(kind := schema.field(column).type):
                raise _of_wrong_type(place, column, table, f"{kind}{reason}")
    _check_others(spec, table, snapshot)


def _check_placed(prompt: PromptSpec, place: str, table: LakeTable, schema: pa.Schema) -> None:
    """Check that the columns of a prompt are there, and can be placed."""
    is_placed, reason = has_text, _PLACED
    if prompt.messages is not None:
        is_placed, reason = has_messages, _MESSAGES
    for column in prompt.columns:
        found = find_place(schema, column)
        if found is None:
            raise _absent(place, column, table, schema)
        if not is_placed(found.kind):
            raise _of_wrong_type(place, column, table, f"{found.kind}{reason}")


def _absent(place: str, column: str, table: LakeTable, schema: pa.Schema) -> SpecError:
    return SpecError(
        f"{place}: table {table.uri} has no column {column!r}{_hint(column, schema)}; it has"
        f" {listed_columns(schema)}"
    )


def _of_wrong_type(place: str, column: str, table: LakeTable, what: str) -> SpecError:
    return SpecError(f"{place}: column {column!r} of table {table.uri} holds {what}")


def _hint(column: str, schema: pa.Schema) -> str:
    """What the writer of a wrong name may have meant."""
    owner = re.split(r"[.\[]", column)[0]
    if owner in schema.names:
        return (
            f" ({owner!r} holds {schema.field(owner).type}; values inside columns are for prompts)"
        )
    alike = [name for name in schema.names if _folded(name) == _folded(column)]
    return f" ({alike[0]!a} is written differently from {column!a})" if alike else ""


def _folded(name: str) -> str:
    """Equal for names that look alike, or differ by case or backquotes."""
    return "".join(unicodedata.normalize("NFKC", name).casefold().replace("`", "").split())


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def check_lengths(spec: JobSpec, max_model_len: int) -> None:
    """Check the outputs' limits against the model's length.

    Raises `SpecError`: no output can have `min_tokens`.
    """
    most = max_model_len - 1  # a prompt has at least one token
    limit = f"prompt and output together have at most {max_model_len} tokens"
    for sampling in (question.sampling for question in spec.questions):
        if sampling.min_tokens > most:
            raise SpecError(
                f"sampling.min_tokens: {sampling.min_tokens} can't be reached: {limit}"
                f" (engine.max_model_len, or what model {spec.model.path} allows)"
            )
        if sampling.max_tokens > most:
            _log.warning(
                "sampling.max_tokens: %d is never reached: %s, where every output ends",
                sampling.max_tokens,
                limit,
            )


def describe_empty(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> str:
    """Why a partition has no rows: it is missing or empty, or the filter keeps none."""
    where = f"table {table.uri}"
    if snapshot.num_rows and spec.input.filter:
        return (
            f"{where}, partition {snapshot.partition!r}: has no rows that meet input.filter"
            f" (of {snapshot.num_rows})"
        )
    try:
        names = [] if snapshot.files or table.outer else table.partitions()
    except TableError:  # not partitioned by the column's values
        names = []
    if snapshot.files or snapshot.partition in names:
        return f"{where}, partition {snapshot.partition!r}: has no rows"
    if table.outer:
        values = {table.partition_column: snapshot.partition, **table.outer}
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"{where}: there is no partition {named}"
    newest = ", ".join(map(repr, names[: -_MAX_NAMED - 1 : -1])) or "none"
    absent = f"{where}: there is no partition {snapshot.partition!r}; the newest are: {newest}"
    return absent + _describe_key(table, snapshot, names)


def _describe_key(table: LakeTable, snapshot: Snapshot, names: Sequence[str]) -> str:
    """What the partition column holds, and how to name it, if the names have another form."""
    column = table.partition_column
    kind = snapshot.schema.field(column).type
    is_time = pa.types.is_timestamp(kind)  # whose names are as long as the time
    if not names or is_time or _form(snapshot.partition) in map(_form, names):
        return ""
    nearest = near(names, snapshot.partition)
    return (
        f". Column {column!r} holds {kind} in another form than {snapshot.partition!r}; the nearest"
        f" are: {', '.join(map(repr, nearest))}; {NAME_ONE}"
    )


def _form(name: str) -> str:
    """The name with its numbers, but not digits of dates, cut to 0: equal for names of one form."""
    return re.sub(r"[0-9]+", lambda run: "0" * (len(run[0]) if len(run[0]) > 3 else 1), name)


def warn_of_control_tokens(spec: JobSpec, num_rows: int) -> None:
    """Log how many rows spell a control token of the model, and what becomes of it."""
    modes = {question.prompt.control_mode for question in spec.questions}
    spelling_rows = counted(num_rows, "row spells", "rows spell")
    if num_rows and "keep" in modes:
        _log.warning(
            "%s control tokens of the model, which stay control tokens: a row can end its turn and"
            " begin another; prompt.special_tokens: text makes ordinary text of them",
            spelling_rows,
        )
    elif num_rows:
        fate = "such a row fails" if "reject" in modes else "in its prompt they are ordinary text"
        _log.info(
            "%s control tokens of the model; %s (prompt.special_tokens)",
            spelling_rows,
            fate,
        )
