"""Checks of an input before its rows are read: columns, partition, lengths."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from batchllm_operator.amounts import counted, first_of
from batchllm_operator.errors import EmptyPartitionError, SpecError, TableError
from batchllm_operator.lake import (
    LakeTable,
    Snapshot,
    listed_columns,
    name_one,
    near,
    row_condition,
)
from batchllm_operator.prompts import has_messages, has_text
from batchllm_operator.shards.row_errors import (
    RowErrors,
    WrittenRows,
    are_too_many,
    too_many_failed,
)
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.row_keys import check_key_types

if TYPE_CHECKING:
    from batchllm_operator.plan.given import Given

_MAX_NAMED: Final = 3  # partitions
_IS_A_TIME: Final = re.compile(r"(19|20|21)[0-9]{2}[-_/]?([0-9]{2}|[WwQq][0-9])")
"""Begins with a year and a month, week or quarter, as dates do."""
_IS_A_YEAR: Final = re.compile(r"(19|20|21)[0-9]{2}$")
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_UNITS_OF_TIME: Final = {
    **dict.fromkeys(("year", "yr", "yyyy", "yy", "y"), 0),
    **dict.fromkeys(("quarter", "qtr", "q"), 1),
    **dict.fromkeys(("month", "mon", "mm", "m", "week", "wk", "w"), 2),
    **dict.fromkeys(("date", "dt", "ds", "day", "dd", "d"), 3),
    **dict.fromkeys(("hour", "hr", "hh", "h"), 4),
}
"""By size, the longest first."""
_FORMS: Final = (
    *("%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"),
    *("%Y-%m-%d %H", "%Y-%m-%dT%H", "%Y-%m-%d-%H", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S.%f"),
    *("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S+00:00", "%Y-%m-%dT%H:%M:%S+00:00", "%Y%m%d"),
    *("%Y%m%d%H", "%Y%m%d-%H", "%Y%m%dT%H%M%S", "%Y/%m/%d", "%Y-%m", "%Y%m", "%G-W%V-%u"),
)
_log = logging.getLogger(__name__)


def check_input(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Check the partition and the columns that the spec names.

    Raises:
        EmptyPartitionError: the table has no such partition, and the spec says `on_empty: fail`.
        SpecError, KeyColumnError, TableError: see `check_columns`.
    """
    if not snapshot.files and spec.on_empty == "fail":
        raise EmptyPartitionError(f"{describe_empty(spec, table, snapshot)} (on_empty: fail)")
    check_columns(spec, table, snapshot)


def _check_outer(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Refuse to read, say, the 31st of several months as one partition.

    Outer columns of other things, such as a region, may have any number of values: a partition is
    in all. So may inner columns, but for those of longer times (`day=31/month=01`).

    Raises:
        SpecError: names the columns that tell the partitions apart.
    """
    if _IS_A_TIME.match(snapshot.partition):  # whatever it lies below
        return
    filtered = {term.column for term in spec.input.filter}
    units = _units(spec.input.partition_column) if snapshot.partition.isdecimal() else []
    unit = min(units, default=0)
    apart = {name: values for name, values in snapshot.outer.items() if _are_times(name, values)}
    for name, values in snapshot.inner.items():
        if any(inner < unit for inner in _units(name)):
            apart[name] = values
    several = {c: v for c, v in apart.items() if len(v) > 1 and c not in filtered}
    if not several:
        return
    own = f"{spec.input.partition_column}={snapshot.partition}"
    shown = " and ".join(
        f"{column} {first_of([*map(repr, values)], _MAX_NAMED)}"
        for column, values in several.items()
    )
    is_number = {c: pa.types.is_integer(snapshot.schema.field(c).type) for c in several}
    last = {c: v[-1] if is_number[c] else f'"{v[-1]}"' for c, v in several.items()}
    terms = ", ".join(f"{{column: {column}, value: {value}}}" for column, value in last.items())
    is_outer = not several.keys() - snapshot.outer.keys()
    folders = " let input.uri name one of the outer folders," if is_outer else ""
    raise SpecError(
        f"input.partition_column: table {table.uri} has partition {own} in {shown}, which would be"
        f" read as one; set input.filter to [{terms}],{folders} or give the table a column that"
        " tells them apart, such as ds=2026-01-31"
    )


def _are_times(column: str, values: Sequence[str]) -> bool:
    return bool(_units(column)) or all(
        _IS_A_TIME.match(value) or _IS_A_YEAR.match(value) for value in values
    )


def _units(column: str) -> list[int]:
    """The units of time that its name has words for, by their places in `_UNITS_OF_TIME`."""
    words = (word.casefold() for word in _WORDS.findall(column))
    return [_UNITS_OF_TIME[word] for word in words if word in _UNITS_OF_TIME]


def check_columns(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    """Check that the table has every column that the spec names, and needs no other.

    Raises:
        SpecError: one is missing, or can't be a part of a prompt or a length, or tells apart what
            would be read as one partition; names the field.
        KeyColumnError, TableError: a key or filter column can't be compared.
    """
    places = {
        f"prompt.{spec.prompt.field}": spec.prompt.columns,
        "input.key": spec.input.key,
        "output.carry": spec.output.carry,
        "input.filter": tuple(term.column for term in spec.input.filter),
        "planner.estimated_output_tokens": spec.planner.estimate_columns,
        "model.adapter_column": tuple(filter(None, [spec.model.adapter_column])),
    }
    for place, columns in places.items():
        for column in columns:
            if column not in snapshot.schema.names:
                owner, inside = re.split(r"[.\[]", column)[0], ""
                if owner in snapshot.schema.names:
                    inside = f" (fields inside {owner!r} can't be named)"
                raise SpecError(
                    f"{place}: table {table.uri} has no column {column!r}{inside}; it has"
                    f" {listed_columns(snapshot.schema)}"
                )
    check_key_types(snapshot.schema, spec.input.key, f"input.key: table {table.uri}")
    row_condition(table.uri, spec.input.filter, snapshot.schema)
    _check_prompt_columns(spec, table, snapshot)
    for place, is_kind, noun in (
        ("model.adapter_column", _is_text, "text"),
        ("planner.estimated_output_tokens", pa.types.is_integer, "integers"),
    ):
        for column in places[place]:
            kind = snapshot.schema.field(column).type
            if not is_kind(kind):
                raise SpecError(
                    f"{place}: column {column!r} of table {table.uri} holds {kind}, not {noun}"
                )
    _check_outer(spec, table, snapshot)


def _check_prompt_columns(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> None:
    for column in spec.prompt.columns:
        kind = snapshot.schema.field(column).type
        if spec.prompt.messages is not None:
            if not has_messages(kind):
                raise SpecError(
                    f"prompt.messages: column {column!r} of table {table.uri} holds {kind}; it"
                    " must be a list of structs with role and content, without dates or bytes, or"
                    " such a list as JSON text"
                )
        elif not has_text(kind):
            raise SpecError(
                f"prompt.{spec.prompt.field}: column {column!r} of table {table.uri} holds {kind};"
                " only text, numbers, booleans, dates, times and lists of these can be placed: cast"
                " it to one of them in the table"
            )


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    return any(is_text(kind) for is_text in texts)


def check_lengths(spec: JobSpec, max_model_len: int) -> None:
    """Check the outputs' limits against the model's length.

    Raises:
        SpecError: no output can have `min_tokens`.
    """
    most = max_model_len - 1  # a prompt has at least one token
    limit = f"prompt and output together have at most {max_model_len} tokens"
    if spec.sampling.min_tokens > most:
        raise SpecError(
            f"sampling.min_tokens: {spec.sampling.min_tokens} can't be reached: {limit}"
            f" (engine.max_model_len, or what model {spec.model.path} allows)"
        )
    if spec.sampling.max_tokens > most:
        _log.warning(
            "sampling.max_tokens: %d is never reached: %s, where every output ends",
            spec.sampling.max_tokens,
            limit,
        )


def describe_rows(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> str:
    """Names the rows that are read, for errors that count rows."""
    where = f"table {table.uri}, partition {snapshot.partition!r}"
    return f"{where}, counting rows that input.filter keeps" if spec.input.filter else where


def describe_empty(spec: JobSpec, table: LakeTable, snapshot: Snapshot) -> str:
    """Why a partition has no rows: it is missing or empty, or the filter keeps none."""
    where = f"table {table.uri}"
    if snapshot.num_rows:
        return (
            f"{where}, partition {snapshot.partition!r}: has no rows that meet input.filter"
            f" (of {snapshot.num_rows})"
        )
    try:
        names = [] if snapshot.files else table.partitions()
    except TableError:  # not partitioned by the column's values
        names = []
    if snapshot.files or snapshot.partition in names:
        return f"{where}, partition {snapshot.partition!r}: has no rows"
    newest = ", ".join(map(repr, names[: -_MAX_NAMED - 1 : -1])) or "none"
    absent = f"{where}: there is no partition {snapshot.partition!r}; the newest are: {newest}"
    return absent + _describe_key(spec, snapshot, names)


def _describe_key(spec: JobSpec, snapshot: Snapshot, names: Sequence[str]) -> str:
    """What the partition column holds, and how to name it, if the names have another form."""
    if not names or _form(snapshot.partition) in map(_form, names):
        return ""
    column = spec.input.partition_column
    kind = snapshot.schema.field(column).type
    nearest = near(names, snapshot.partition)
    form = next((f for f in _FORMS if _has_form(nearest[0], f)), None)
    value = "..." if form is None else f"logical_date.strftime('{form}')"
    return (
        f". Column {column!r} holds {kind} in another form than {snapshot.partition!r}; the nearest"
        f" are: {', '.join(map(repr, nearest))}; {name_one(value)}"
    )


def _form(name: str) -> str:
    """The name with its numbers, but not digits of dates, cut to 0: equal for names of one form."""
    return re.sub(r"[0-9]+", lambda run: "0" * (len(run[0]) if len(run[0]) > 3 else 1), name)


def _has_form(name: str, form: str) -> bool:
    try:
        return datetime.strptime(name, form).strftime(form) == name
    except ValueError:
        return False


def check_rows(given: Given, row_counts: Mapping[str, int], written: WrittenRows) -> None:
    """Refuse an empty partition if the spec says so; warn of rows without a prompt.

    Args:
        row_counts: the fields of `PlanCounts` that reading rows tells.
        written: the rows that were read.

    Raises:
        EmptyPartitionError: there are no rows, and the spec says `on_empty: fail`.
        FailedRowsError: there are more such rows than the spec allows.
    """
    spec, num_rows = given.spec, row_counts["num_rows"]
    num_rejected = row_counts["num_rejected_rows"]
    if num_rows == 0:
        reason = describe_empty(spec, given.table, given.snapshot)
        if spec.on_empty == "fail":
            raise EmptyPartitionError(f"{reason} (on_empty: fail)")
        _log.warning("%s: an empty partition will be committed", reason)
    if num_rejected:
        _log.warning(
            "%d of %s can't be prompted; the reasons will be in the output's error column",
            num_rejected,
            counted(num_rows, "row"),
        )
    if are_too_many(spec, num_rejected, num_rows):
        errors = RowErrors()
        errors.add_rejected(written)
        raise too_many_failed(
            spec,
            num_rows,
            written,
            errors,
            verdict="no plan was made",
            cure="To generate for the other rows all the same, raise max_failed_fraction in the"
            " spec, and plan again",
        )
    warn_of_control_tokens(spec, row_counts["num_control_rows"])


def warn_of_control_tokens(spec: JobSpec, num_rows: int) -> None:
    """Log how many rows spell a control token of the model, and what becomes of it."""
    mode, spelling_rows = spec.prompt.control_mode, counted(num_rows, "row spells", "rows spell")
    if num_rows and mode == "keep":
        _log.warning(
            "%s control tokens of the model, which stay control tokens: a row can end its turn and"
            " begin another; prompt.special_tokens: text makes ordinary text of them",
            spelling_rows,
        )
    elif num_rows:
        fate = "in its prompt they are ordinary text" if mode == "text" else "such a row fails"
        _log.info(
            "%s control tokens of the model; %s (prompt.special_tokens)",
            spelling_rows,
            fate,
        )
