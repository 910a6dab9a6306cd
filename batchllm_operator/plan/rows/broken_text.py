"""Refuses text that isn't UTF-8 in published columns: readers interpret it differently."""

from __future__ import annotations

import pyarrow as pa

from batchllm_operator.errors import KeyColumnError, TableError
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.row_keys import shown_key


def check_text(spec: JobSpec, batch: pa.RecordBatch, start: int, where: str) -> None:
    """Refuse broken text in a key or carried column, also inside nested values.

    Args:
        batch: rows of the input with all kept columns.
        start: index of the first row.
        where: the table's name in errors.

    Raises:
        KeyColumnError, TableError: names the column and its first broken row.
    """
    for name in spec.kept_columns:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()  # only values that rows have
        try:
            column.validate(full=True)  # a gigabyte per second: cheap beside tokenizing
        except pa.ArrowInvalid as error:
            raise _refusal(spec, batch, name, start, where, error) from error


def _refusal(
    spec: JobSpec, batch: pa.RecordBatch, name: str, start: int, where: str, error: Exception
) -> TableError:
    column = batch.column(name)
    idx = next((idx for idx in range(len(column)) if _is_broken(column[idx])), None)
    if idx is None:  # other damage
        return TableError(f"{where}: column {name!r} can't be read: {error}")
    row = f"row {start + idx} (counted from 0)"
    if name in spec.input.key:
        shown = shown_key(column[idx])
        return KeyColumnError(
            f"{where}: key column {name!r} isn't valid UTF-8 in {row}: {shown}; fix it in the table"
        )
    return TableError(
        f"{where}: column {name!r} isn't valid UTF-8 in {row}, {describe_key(spec, batch, idx)};"
        " fix it in the table, or remove it from output.carry"
    )


def describe_key(spec: JobSpec, batch: pa.RecordBatch, idx: int) -> str:
    """The key of a row, for errors."""
    return ", ".join(f"{key}={shown_key(batch.column(key)[idx])}" for key in spec.input.key)


def _is_broken(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return True
    except (ValueError, OverflowError):  # nanoseconds, years after 9999
        return False
    return False
