"""From a table's rows to token ids: the streaming part of the plan stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm_operator.lake import LakeTable, Snapshot
from batchllm_operator.pipeline.broken_text import check_text
from batchllm_operator.pipeline.input_checks import describe_rows
from batchllm_operator.pipeline.reuse import Reuse
from batchllm_operator.planner import PrefixSearch, PromptStore, TokenTable
from batchllm_operator.planner.plan import ERROR_COLUMN
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import PromptRenderer, Tokenizer, first_occurrences, length_fault
from batchllm_operator.spec import JobSpec

_CHARACTERS_AT_ONCE: Final = 4 << 20  # of prompts that are rendered and tokenized together
_FIRST_ROWS: Final = 64


@dataclass(slots=True)
class Rows:
    """What is gathered while the rows stream by: their prompts, and some numbers of each."""

    prompts: PromptStore
    """Prompts of the rows that can be prompted and reuse nothing."""
    search: PrefixSearch
    """Has seen the same prompts."""
    reuse: Reuse | None = None
    """Has seen the prompts of all rows that can be prompted, and kept those that reuse an output
    from the others here; None if nothing is to be reused."""
    num_rows: int = 0
    prompted: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Rows of these prompts, batch by batch."""
    estimates: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Their output tokens, where a column holds them."""

    @property
    def num_reused(self) -> int:
        """Rows that take their output from an earlier commit."""
        return 0 if self.reuse is None else self.reuse.num_rows

    @property
    def num_rejected(self) -> int:
        """Rows that can't be prompted."""
        return self.num_rows - self.num_reused - len(self.prompts)

    def row_idxs(self) -> npt.NDArray[np.int64]:
        """The row of each prompt: int64 [num_prompts]."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.prompted])

    def output_tokens(self) -> npt.NDArray[np.int64] | None:
        """Estimates for each prompt, where a column holds them: int64 [num_prompts]."""
        return np.concatenate(self.estimates) if self.estimates else None


def read_rows(
    spec: JobSpec,
    table: LakeTable,
    snapshot: Snapshot,
    tokenizer: Tokenizer,
    rows: Rows,
    path: Path,
) -> None:
    """Stream the rows into token ids, and write their keys, carried columns and faults to `path`.

    Args:
        spec: the job.
        table: where the rows are.
        snapshot: which they are.
        tokenizer: the model's.
        rows: empty; gathers what is read.
        path: a file to create.

    Raises:
        TableError, StorageError: see `LakeTable.scan`; or a key or carried column isn't UTF-8.
        ModelError: the chat template refuses a prompt.
        OSError: the disk is full.
    """
    schema = pa.schema(
        [
            *(snapshot.schema.field(name) for name in spec.kept_columns),
            pa.field(ERROR_COLUMN, pa.string()),
        ]
    )
    renderer = PromptRenderer(spec.prompt)
    where = describe_rows(spec, table, snapshot)
    num_at_once = _FIRST_ROWS
    with (
        pq.ParquetWriter(path, schema, compression="zstd") as writer,
        Progress("read and tokenize", snapshot.num_rows) as progress,
    ):
        for batch in table.scan(snapshot, spec.input_columns, spec.input.filter):
            if batch.num_rows == 0:
                continue
            check_text(spec, batch, rows.num_rows, where)
            errors: list[str | None] = []
            while (start := len(errors)) < batch.num_rows:
                piece = batch.slice(start, num_at_once)
                rendered = renderer.render(piece)
                num_at_once = _num_at_once(rendered.texts)
                estimates = _estimates(spec, piece)
                errors += _tokenize(rendered.texts, rendered.errors, estimates, tokenizer, rows)
                rows.num_rows += piece.num_rows
            columns = [batch.column(name) for name in spec.kept_columns]
            writer.write_table(
                pa.Table.from_arrays([*columns, pa.array(errors, pa.string())], schema=schema)
            )
            progress.advance(batch.num_rows, f"{rows.prompts.num_tokens} tokens")
        progress.complete()  # a filter leaves rows out
    if rows.reuse is not None:
        rows.reuse.finish(rows.num_rows)


def deduplicated_tokens(tokens: TokenTable, *, merge: bool) -> TokenTable:
    """The distinct prompts if `merge`, else all."""
    if not merge:
        return tokens
    first = first_occurrences(tokens)
    return tokens.take(np.flatnonzero(first == np.arange(len(first))))


def _num_at_once(texts: list[str | None]) -> int:
    """Rows to render next, if they are as long as these."""
    num_characters = sum(len(text) for text in texts if text is not None)
    return max(1, len(texts) * _CHARACTERS_AT_ONCE // max(1, num_characters))


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
    idxs = np.flatnonzero([text is not None for text in texts])
    tokens = tokenizer.encode([text for text in texts if text is not None])
    fits = np.ones(len(idxs), dtype=np.bool_)
    for number, (idx, length) in enumerate(zip(idxs, tokens.lengths.tolist(), strict=True)):
        errors[idx] = length_fault(length, tokenizer.max_model_len)
        fits[number] = errors[idx] is None
    if not fits.all():
        idxs, tokens = idxs[fits], tokens.take(np.flatnonzero(fits))
    if rows.reuse is not None:
        is_new = ~rows.reuse.take(tokens, rows.num_rows + idxs)
        if not is_new.all():
            idxs, tokens = idxs[is_new], tokens.take(np.flatnonzero(is_new))
    rows.prompts.append(tokens)
    rows.search.add(tokens)
    rows.prompted.append(rows.num_rows + idxs)
    if estimates is not None:
        rows.estimates.append(np.asarray(estimates, dtype=np.int64)[idxs])
    return errors
