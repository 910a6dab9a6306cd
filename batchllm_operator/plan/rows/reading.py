"""Reads a table's rows into token ids: the streaming part of the plan stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.amounts import counted
from batchllm_operator.errors import KeyColumnError, TableError
from batchllm_operator.lake import StoredColumns, joined
from batchllm_operator.plan.earlier_outputs import Reuse
from batchllm_operator.plan.rows.adapters import RowAdapters
from batchllm_operator.plan.rows.asking import Asker, taken, woven
from batchllm_operator.plan.rows.ordering import order_counts, with_orders
from batchllm_operator.plan.rows.prompting import warn_of_doubled_start
from batchllm_operator.prefixes import FieldOrders, PromptStore, TokenTable
from batchllm_operator.prefixes.jit import Int64s
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import Tokenizer
from batchllm_operator.row_error import UNASKED, RowError
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_FIELD, errors_field
from batchllm_operator.stored_plan.row_keys import shown_key
from batchllm_operator.streams import ahead, one_ahead

if TYPE_CHECKING:
    from batchllm_operator.plan.given import Given
    from batchllm_operator.plan.rounds import EarlierAnswers

_BYTES_AT_ONCE: Final = 4 << 20  # prompts rendered and tokenized together
_FIRST_ROWS: Final = 64
NO_ROWS: Final = order_counts() | dict.fromkeys(
    ("num_rows", "num_unasked_rows", "num_control_rows", "num_truncated_rows"), 0
)
"""Fields of `PlanCounts` that pieces add to."""
_LEAVE_IT_OUT: Final = ", or remove it from output.carry"


@dataclass(slots=True)
class Rows:
    """The rows read so far: their prompts, and some numbers of each."""

    prompts: PromptStore
    """Prompts of rows that don't reuse an output."""
    reuse: Reuse | None = None
    """Has the prompts of all rows, and takes out those that reuse an output; None without reuse."""
    orders: FieldOrders | None = None
    """Of the rows' fields; None if they stand in the template's order."""
    _counts: Counter[str] = field(default_factory=lambda: Counter(NO_ROWS))
    _row_idxs: list[Int64s] = field(default_factory=list)
    _estimates: list[Int64s] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Fields of `PlanCounts`."""
        num_reused = 0 if self.reuse is None else self.reuse.num_rows
        num_asked = self._counts["num_rows"] - self._counts["num_unasked_rows"]
        num_rejected = num_asked - num_reused - len(self.prompts)
        others = {"num_rejected_rows": num_rejected, "num_reused_rows": num_reused}
        return {**self._counts, **others, **order_counts(self.orders)}

    def row_idxs(self) -> Int64s:
        """The row of each prompt: int64 [num_prompts]."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._row_idxs])

    def output_tokens(self) -> Int64s | None:
        """Estimates for each prompt, if a column holds them: int64 [num_prompts]."""
        return np.concatenate(self._estimates) if self._estimates else None

    def add(self, piece: Tokenized) -> None:
        """Count and keep the next rows."""
        self._counts.update(piece.counts)
        self.prompts.append(piece.tokens)
        self._row_idxs.append(piece.row_idxs)
        if piece.estimates is not None:
            self._estimates.append(piece.estimates)


def read_rows(given: Given, rows: Rows, path: Path, earlier: EarlierAnswers | None = None) -> None:
    """Read a table into the empty `rows`; write keys, carried columns and faults to a new file.

    Raises:
        TableError, StorageError: see `LakeTable.scan`; or a key or carried column isn't UTF-8.
        ModelError: the chat template refuses a prompt.
        OSError: the disk is full.
    """
    spec, snapshot = given.spec, given.snapshot
    scan = given.table.scan(snapshot, spec.input_columns, spec.input.filter)
    with (
        open_rows_file(path, spec, snapshot.schema, _taken_fields(rows.reuse)) as writer,
        Progress("read and tokenize", snapshot.num_rows) as progress,
        one_ahead(scan) as scanned,
    ):
        # Reading, tokenizing and keeping run side by side: memory holds three batches.
        batches = checked(spec, joined(scanned), given.where, stored=given.stored)
        batches = with_orders(batches, rows.orders)
        made = tokenize(spec, batches, given.tokenizers, given.adapters, rows.reuse, earlier)

        def keep(piece: Tokenized) -> int:
            if not rows.counts["num_rows"]:
                _warn_of_doubled_starts(given, piece)
            rows.add(piece)
            if piece.kept is not None:
                writer.write_table(piece.kept)
            return piece.counts["num_rows"] // len(given.tokenizers)

        for num_rows in ahead(made, keep, num_threads=1):
            progress.advance(num_rows, counted(rows.prompts.num_tokens, "token"))
        progress.expect(0)  # a filter may skip rows
    if rows.reuse is not None:
        rows.reuse.finish(rows.counts["num_rows"])


def _warn_of_doubled_starts(given: Given, piece: Tokenized) -> None:
    for number, question in enumerate(given.spec.questions):
        is_asked = piece.row_idxs % len(given.tokenizers) == number
        tokens = piece.tokens.take(np.flatnonzero(is_asked)[:_FIRST_ROWS])
        warn_of_doubled_start(question, tokens, given.tokenizers[number])


def open_rows_file(
    path: Path, spec: JobSpec, schema: pa.Schema, taken: Sequence[pa.Field] = ()
) -> pq.ParquetWriter:
    """A new file of keys, carried columns and faults of rows, and of answers that are taken from
    the published partition; `schema` is the input's."""
    columns = pa.schema([*rows_schema(spec, schema), *taken])
    return pq.ParquetWriter(path, columns, compression="zstd")


def rows_schema(spec: JobSpec, schema: pa.Schema) -> pa.Schema:
    """The columns of `open_rows_file`, as the output names them."""
    kept = (schema.field(source).with_name(name) for name, source in spec.kept_columns.items())
    return pa.schema([*kept, errors_field(spec)])


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Prompts of some rows, a piece of a batch."""

    counts: Mapping[str, int]
    """Of `NO_ROWS`: all rows, those that aren't asked, those that spell a control token, those of
    which a value was cut."""
    tokens: TokenTable
    row_idxs: Int64s
    """int64 [num_prompts], ascending; in a job of several prompts the asks, as in counts."""
    estimates: Int64s | None
    """int64 [num_prompts], output tokens, if a column holds them."""
    kept: pa.Table | None
    """With the last piece of a batch: the batch's columns for `open_rows_file`."""


def checked(
    spec: JobSpec,
    batches: Iterable[pa.RecordBatch],
    where: str,
    first_row: int = 0,
    stored: StoredColumns | None = None,
) -> Iterator[pa.RecordBatch]:
    """The same batches, unless one has a value that can't be published.

    Args:
        where: names the rows in errors.
        first_row: number of the first row in errors.
        stored: the columns in the output table.

    Raises `KeyColumnError`, `TableError`: a key or carried column, or a value nested in it, isn't
    UTF-8, or doesn't fit the output table; names its first row.
    """
    for batch in batches:
        kept = {name: batch.column(source) for name, source in spec.kept_columns.items()}
        for name, column in kept.items():
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()  # only values that rows have
            try:
                column.validate(full=True)  # a gigabyte per second: cheap beside tokenizing
            except pa.ArrowInvalid as error:
                name = spec.kept_columns[name]
                raise _refusal(spec, batch, name, first_row, where, error) from error
        if stored is not None:
            rows = pa.RecordBatch.from_pydict(kept)
            stored.check(rows, first_row, partial(_describe_key, spec))
        yield batch
        first_row += batch.num_rows


def tokenize(
    spec: JobSpec,
    batches: Iterable[pa.RecordBatch],
    tokenizers: Sequence[Tokenizer],
    adapters: RowAdapters | None,
    reuse: Reuse | None = None,
    earlier: EarlierAnswers | None = None,
) -> Iterator[Tokenized]:
    """Render and tokenize rows, counted from 0; yields pieces in their order.

    Args:
        tokenizers: one for each of the spec's questions.
        reuse: keeps, and takes out, the prompts of rows that reuse an output.
        earlier: what rounds before have answered; None in the first.

    Raises `ModelError`, `TokenIdsDifferError`: see `Tokenizer.encode`.
    """
    questions, round_idx = spec.questions, 0 if earlier is None else earlier.num_rounds
    num = len(questions)
    askers = [
        Asker(spec, number, questions[number], tokenizers[number], adapters)
        for number in spec.rounds[round_idx]
    ]
    later = [number for numbers in spec.rounds[round_idx + 1 :] for number in numbers]
    first_row, num_at_once = 0, _FIRST_ROWS
    for batch in batches:
        answered, errors = (batch, {}) if earlier is None else earlier.beside(batch)
        for number in later:
            asks_later = range(number, batch.num_rows * num, num)
            errors |= dict.fromkeys(asks_later, UNASKED)
        start = 0
        while start < batch.num_rows:
            rows = answered.slice(start, num_at_once)
            pieces = [asker.ask(rows) for asker in askers]
            for piece in pieces:
                errors |= {start * num + ask: error for ask, error in piece.errors.items()}
            asks, tokens, estimates = woven(pieces)
            if reuse is not None:
                is_new = ~reuse.take(tokens, first_row * num + asks, rows, first_row)
                estimates = None if estimates is None else estimates[is_new]
                asks, tokens = taken(asks, tokens, is_new)
            # The next rows, if they are as long as these.
            num_bytes = sum(piece.num_bytes for piece in pieces)
            num_at_once = max(1, rows.num_rows * _BYTES_AT_ONCE // max(1, num_bytes))
            start += rows.num_rows
            kept = _kept(spec, batch, errors, reuse) if start == batch.num_rows else None
            counts = {
                "num_rows": rows.num_rows * num,
                "num_unasked_rows": rows.num_rows * num - sum(p.num_asked for p in pieces),
                "num_control_rows": sum(len(piece.control_rows) for piece in pieces),
                "num_truncated_rows": sum(piece.num_truncated for piece in pieces),
            }
            yield Tokenized(counts, tokens, first_row * num + asks, estimates, kept)
            first_row += rows.num_rows


def _kept(
    spec: JobSpec, batch: pa.RecordBatch, errors: Mapping[int, RowError], reuse: Reuse | None
) -> pa.Table:
    num = len(spec.questions)
    faults = pa.array(map(errors.get, range(batch.num_rows * num)), ERROR_FIELD.type)
    if spec.prompts:
        ends = pa.array(np.arange(batch.num_rows + 1) * num, pa.int32())
        faults = pa.ListArray.from_arrays(ends, faults)
    columns = [*map(batch.column, spec.kept_columns.values()), faults]
    schema = pa.schema([*rows_schema(spec, batch.schema), *_taken_fields(reuse)])
    if reuse is not None and reuse.published is not None:
        columns += reuse.published.columns(list(spec.prompts))
    return pa.Table.from_arrays(columns, schema=schema)


def _taken_fields(reuse: Reuse | None) -> Sequence[pa.Field]:
    return () if reuse is None or reuse.published is None else reuse.published.fields


def _refusal(
    spec: JobSpec, batch: pa.RecordBatch, name: str, start: int, where: str, error: Exception
) -> TableError:
    column = batch.column(name)
    idx = next((idx for idx in range(len(column)) if _is_broken(column[idx])), None)
    if idx is None:  # other damage
        return TableError(f"{where}: column {name!r} can't be read: {error}")
    kind, other = (KeyColumnError, "") if name in spec.input.key else (TableError, _LEAVE_IT_OUT)
    return kind(
        f"{where}: column {name!r} isn't valid UTF-8 in row {start + idx} (counted from 0),"
        f" {_describe_key(spec, batch, idx)}; fix it in the table{other}"
    )


def _describe_key(spec: JobSpec, batch: pa.RecordBatch, idx: int) -> str:
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
