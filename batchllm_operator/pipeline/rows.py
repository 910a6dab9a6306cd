"""From a table's rows to token ids: the streaming part of the plan stage."""

from __future__ import annotations

import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.errors import KeyColumnError
from batchllm_operator.lake import LakeTable, Snapshot
from batchllm_operator.planner import TokenTable
from batchllm_operator.planner.plan import ERROR_COLUMN
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import PromptRenderer, Tokenizer, first_occurrences, length_fault
from batchllm_operator.spec import JobSpec

_MAX_NAMED: Final = 10


@dataclass(slots=True)
class Rows:
    """What is gathered while the rows stream by."""

    num_rows: int = 0
    keys: list[pa.RecordBatch] = field(default_factory=list)
    row_idxs: array.array[int] = field(default_factory=lambda: array.array("q"))
    """Rows that can be prompted."""
    token_ids: array.array[int] = field(default_factory=lambda: array.array("i"))
    offsets: array.array[int] = field(default_factory=lambda: array.array("q", [0]))
    output_tokens: array.array[int] = field(default_factory=lambda: array.array("q"))
    """Estimates of the rows that can be prompted, where a column holds them."""

    @property
    def num_rejected(self) -> int:
        """Rows that can't be prompted."""
        return self.num_rows - len(self.row_idxs)

    def tokens(self) -> TokenTable:
        """The prompts, as views of what was gathered; nothing may be added afterwards."""
        return TokenTable(
            np.frombuffer(self.token_ids, dtype=np.int32),
            np.frombuffer(self.offsets, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """Distinct prompts, and the rows that each stands for."""

    tokens: TokenTable
    row_idxs: npt.NDArray[np.int64]
    """int64 [num_rows that can be prompted], the rows of request 0, of request 1, ..."""
    offsets: npt.NDArray[np.int64]
    """int64 [num_requests + 1] into `row_idxs`."""
    output_tokens: npt.NDArray[np.int64] | None = None
    """int64 [num_requests], the largest estimate of its rows, where a column holds them."""

    def rows_of(self, idx: int) -> npt.NDArray[np.int64]:
        """Rows that request `idx` stands for, ascending."""
        return self.row_idxs[self.offsets[idx] : self.offsets[idx + 1]]


def read_rows(
    spec: JobSpec, table: LakeTable, snapshot: Snapshot, tokenizer: Tokenizer, path: Path
) -> Rows:
    """Stream the rows into token ids, and write their keys, carried columns and faults to `path`.

    Raises:
        TableError, StorageError: see `LakeTable.scan`.
        ModelError: the chat template refuses a prompt.
    """
    schema = pa.schema(
        [
            *(snapshot.schema.field(name) for name in spec.kept_columns),
            pa.field(ERROR_COLUMN, pa.string()),
        ]
    )
    renderer = PromptRenderer(spec.prompt)
    rows = Rows()
    with (
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
        Progress("read and tokenize", sum(file.num_rows for file in snapshot.files)) as progress,
    ):
        for batch in table.scan(snapshot, spec.input_columns, spec.input.filter):
            if batch.num_rows == 0:
                continue
            rendered = renderer.render(batch)
            estimates = _estimates(spec, batch)
            errors = _tokenize(rendered.texts, rendered.errors, estimates, tokenizer, rows)
            columns = [batch.column(name) for name in spec.kept_columns]
            writer.write_table(
                pa.Table.from_arrays([*columns, pa.array(errors, pa.string())], schema=schema)
            )
            rows.keys.append(_select_keys(batch, spec.input.key))
            rows.num_rows += batch.num_rows
            progress.advance(batch.num_rows, f"{len(rows.token_ids)} tokens")
        progress.complete()  # a filter leaves rows out
    return rows


def check_keys(batches: list[pa.RecordBatch], key: tuple[str, ...], where: str) -> None:
    """Each row must have a key, and one of its own.

    Raises:
        KeyColumnError: names up to ten offenders.
    """
    if not batches:
        return
    keys = pa.Table.from_batches(batches)
    for name in key:
        nulls = np.flatnonzero(keys.column(name).is_null().to_numpy())
        if len(nulls):
            raise KeyColumnError(
                f"{where}: key column {name!r} is null in {len(nulls)} rows, such as row"
                f" {', '.join(map(str, nulls[:_MAX_NAMED]))} (counted from 0)"
            )
    try:
        counted = keys.group_by(list(key), use_threads=False).aggregate([([], "count_all")])
    except pa.ArrowNotImplementedError as error:
        raise KeyColumnError(f"{where}: key {', '.join(key)} can't be compared: {error}") from error
    repeated = counted.filter(pc.greater(counted["count_all"], 1))
    if repeated.num_rows:
        named = ", ".join(
            " / ".join(repr(row[name]) for name in key)
            for row in repeated.slice(0, _MAX_NAMED).to_pylist()
        )
        num_more = repeated.num_rows - _MAX_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        raise KeyColumnError(
            f"{where}: key ({', '.join(key)}) isn't unique: {named}{more} occur more than once"
        )


def deduplicate(rows: Rows, *, merge: bool) -> Requests:
    """One request per distinct prompt if `merge`, else one per row."""
    tokens, row_idxs = rows.tokens(), np.frombuffer(rows.row_idxs, dtype=np.int64)
    estimates = np.frombuffer(rows.output_tokens, dtype=np.int64) if rows.output_tokens else None
    one_each = Requests(tokens, row_idxs, np.arange(len(row_idxs) + 1, dtype=np.int64), estimates)
    if not merge:
        return one_each
    first = first_occurrences(tokens)
    kept = np.flatnonzero(first == np.arange(len(first)))
    if len(kept) == len(first):
        return one_each
    by_request = np.argsort(first, kind="stable")  # rows of a request adjacent, in input order
    ends = np.searchsorted(first[by_request], kept, side="right")
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    if estimates is not None:
        estimates = np.maximum.reduceat(estimates[by_request], offsets[:-1])
    return Requests(tokens.take(kept), row_idxs[by_request], offsets, estimates)


def _select_keys(batch: pa.RecordBatch, key: tuple[str, ...]) -> pa.RecordBatch:
    """The key columns, decoded: dictionaries of two batches can't be compared by code."""
    columns = [batch.column(name) for name in key]
    return pa.RecordBatch.from_arrays(
        [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in columns],
        names=list(key),
    )


def deduplicated_tokens(tokens: TokenTable, *, merge: bool) -> TokenTable:
    """The distinct prompts if `merge`, else all."""
    if not merge:
        return tokens
    first = first_occurrences(tokens)
    return tokens.take(np.flatnonzero(first == np.arange(len(first))))


def _estimates(spec: JobSpec, batch: pa.RecordBatch) -> list[int] | None:
    """Estimated output tokens of the batch's rows, where a column holds them."""
    most, least = spec.sampling.max_tokens, max(1, spec.sampling.min_tokens)
    for name in spec.planner.estimate_columns:
        values = batch.column(name).to_pylist()
        return [most if v is None else max(least, min(v, most)) for v in values]
    return None


def _tokenize(
    texts: list[str | None],
    errors: list[str | None],
    estimates: list[int] | None,
    tokenizer: Tokenizer,
    rows: Rows,
) -> list[str | None]:
    """Add the prompts of a batch to `rows`; return its errors, too long prompts included."""
    errors = list(errors)
    idxs = [idx for idx, text in enumerate(texts) if text is not None]
    encoded = tokenizer.encode([text for text in texts if text is not None])
    for idx, token_ids in zip(idxs, encoded, strict=True):
        errors[idx] = length_fault(len(token_ids), tokenizer.max_model_len)
        if errors[idx] is None:
            rows.row_idxs.append(rows.num_rows + idx)
            rows.token_ids.extend(token_ids)
            rows.offsets.append(len(rows.token_ids))
            if estimates is not None:
                rows.output_tokens.append(estimates[idx])
    return errors
