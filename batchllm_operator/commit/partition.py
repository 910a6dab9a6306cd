"""The published partition's rows: outputs sorted by row, checked, and joined with their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.answers import Answers
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import LakeTable, gather, published_schema, write_files
from batchllm_operator.row_error import RowError
from batchllm_operator.shards.buckets import Outputs, read_all, spread
from batchllm_operator.shards.outputs import STATUS_COLUMN, model_name, output_schema
from batchllm_operator.shards.parts import PartEntry, errors_in, part_schema, read_ledger
from batchllm_operator.spec import JobSpec
from batchllm_operator.spec.tasks import INVALID_OUTPUT
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, ROWS_FILE
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead, batches_of

_ROWS_AT_ONCE: Final = 1 << 13
_TOKENS_AT_ONCE: Final = 1 << 19  # some 2 MiB of text
_BATCH_ROWS: Final = 1 << 16
_SLICE_ROWS: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard, finished unless its reader says otherwise: its folder and its ledger."""

    folder: Folder
    entries: Sequence[PartEntry]

    def parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read the parts, small ones merged, a few ahead."""

        def read(entries: Sequence[PartEntry]) -> pa.Table:
            files = (self.folder.read_bytes(entry.path) for entry in entries)
            readers = (pq.ParquetFile(pa.BufferReader(file)) for file in files)
            return pa.concat_tables(each.read(list(columns), use_threads=False) for each in readers)

        rows = (_ROWS_AT_ONCE, attrgetter("num_rows"))
        tokens = (_TOKENS_AT_ONCE, attrgetter("num_output_tokens"))
        return ahead(batches_of(self.entries, rows, tokens), read)

    def failed(self) -> Iterator[tuple[RowError, list[int]]]:
        """The error and the rows of each failed request; reads the parts that have some."""
        entries = [entry for entry in self.entries if entry.num_failed_rows]
        for part in replace(self, entries=entries).parts(["row_idxs", "error"]):
            yield from errors_in(part)


def stored_shards(plan: StoredPlan) -> list[FinishedShard]:
    """The shards in order, each with the parts that it has so far."""
    folders = [plan.run_folder(shard_idx) for shard_idx in range(len(plan.manifest.shards))]
    ledgers = [read_ledger(folder, plan.manifest.plan_id) for folder in folders]
    return [
        FinishedShard(folder, list(ledger.values()))
        for folder, ledger in zip(folders, ledgers, strict=True)
    ]


def write_partition(
    plan: StoredPlan, sources: Sequence[Outputs], spool: Path, table: LakeTable
) -> Path:
    """Write the partition's rows, in input order, to files in a folder; returns the folder.

    Memory is one bucket of rows and two row groups, whatever the number of rows; see `spread` and
    `write_files`.

    Args:
        plan: the plan of the rows.
        sources: their outputs.
        spool: a local folder.
        table: where they will be published; tells how large a file may be.

    Raises:
        PlanError: a row has no output, or more than one.
    """
    joining = Joining.of(plan, sources)
    num_rows = plan.manifest.counts.num_rows
    buckets = spread(sources, part_schema(plan.manifest.spec), num_rows, spool)
    most = table.most_file_bytes
    tables = joining.tables(plan, 0, None, buckets.num_rows_each, buckets)
    write_files(gather(tables, most), spool / "data", joining.schema, most)
    return spool / "data"


@dataclass(frozen=True, slots=True)
class Joining:
    """Puts outputs beside their rows.

    Attributes:
        spec: the job's.
        answers: its kinds of answers.
        names: columns of the plan's rows.
        schema: columns of the output table.
        run_id: that of the plan.
    """

    spec: JobSpec
    answers: Answers
    names: tuple[str, ...]
    schema: pa.Schema
    run_id: str

    @classmethod
    def of(cls, plan: StoredPlan, sources: Sequence[Outputs]) -> Joining:
        """For the plan's rows, and all of their outputs.

        Raises:
            PlanError: the plan lacks columns that the job keeps.
        """
        spec, manifest = plan.manifest.spec, plan.manifest
        rows_schema, planned = plan.rows_schema(), manifest.answers
        _check_kept(plan, rows_schema)
        columns = output_schema(spec, rows_schema, planned)
        schema = published_schema(columns, plan.publication)
        answers = Answers.of(spec, planned).over(partial(read_all, sources))
        return cls(spec, answers, tuple(rows_schema.names), schema, plan.publication.run_id)

    def tables(
        self,
        plan: StoredPlan,
        first_row: int,
        end_row: int | None,
        num_rows_each: int,
        buckets: Iterable[pa.Table],
    ) -> Iterator[pa.Table]:
        """The published rows [first_row, end_row), in order.

        Args:
            num_rows_each: rows of a bucket, except the last.
            buckets: outputs, each bucket's sorted by `row_idx`.

        Raises:
            PlanError: a row has no output, or more than one.
        """
        values = {"model": model_name(self.spec), "run_id": self.run_id}
        constants = {name: pa.repeat(value, _SLICE_ROWS) for name, value in values.items()}
        start = first_row
        all_rows = _rebatch(plan, self.names, num_rows_each, first_row, end_row)
        for rows, outputs in zip(all_rows, buckets, strict=True):
            yield from _join(self.spec, self.answers, rows, outputs, start, constants, self.schema)
            start += rows.num_rows


def _check_kept(plan: StoredPlan, rows_schema: pa.Schema) -> None:
    missing = set(plan.manifest.spec.kept_columns).difference(rows_schema.names)
    if missing:
        raise PlanError(
            f"plan {plan.folder.uri}: {ROWS_FILE} lacks {', '.join(sorted(missing))}; make the plan"
            " again"
        )


def _rebatch(
    plan: StoredPlan,
    columns: Sequence[str],
    bucket_rows: int,
    first_row: int,
    end_row: int | None,
) -> Iterator[pa.Table]:
    kept: list[pa.RecordBatch] = []
    num_kept = 0
    batches = plan.row_batches(
        columns, first_row, end_row, batch_size=min(bucket_rows, _BATCH_ROWS)
    )
    for batch in batches:
        while num_kept + batch.num_rows >= bucket_rows:
            head = batch.slice(0, bucket_rows - num_kept)
            yield pa.Table.from_batches([*kept, head])
            batch = batch.slice(head.num_rows)
            kept, num_kept = [], 0
        if batch.num_rows:
            kept.append(batch)
            num_kept += batch.num_rows
    if kept:
        yield pa.Table.from_batches(kept)


def _join(
    spec: JobSpec,
    answers: Answers,
    rows: pa.Table,
    outputs: pa.Table,
    start: int,
    constants: Mapping[str, pa.Array],
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Put each row's output beside it; rows that couldn't be prompted have none."""
    prompted = rows[ERROR_COLUMN].is_null().to_numpy()
    expected = np.flatnonzero(prompted) + start
    found = outputs["row_idx"].to_numpy()
    if not np.array_equal(expected, found):
        repeated = found[1:][found[1:] == found[:-1]]
        wrong = repeated if len(repeated) else np.setxor1d(expected, found)
        raise PlanError(
            f"row {wrong[0]} has {np.count_nonzero(found == wrong[0])} outputs where the plan"
            f" wants {np.count_nonzero(expected == wrong[0])}; {len(wrong)} such rows; nothing was"
            " published"
        )
    outputs = outputs.drop_columns("row_idx")  # a key may have the same name
    place = None if prompted.all() else np.cumsum(prompted) - 1
    for first in range(0, rows.num_rows, _SLICE_ROWS):
        chosen = slice(first, first + _SLICE_ROWS)
        some = rows.slice(first, _SLICE_ROWS)
        if place is None:
            joined = outputs.slice(first, _SLICE_ROWS)
        else:
            joined = outputs.take(pa.array(place[chosen], mask=~prompted[chosen]))
        columns = {name: joined[name] for name in joined.column_names}
        columns |= answers.columns(joined)
        columns |= _outcomes(spec, some[ERROR_COLUMN], joined)
        for name, value in constants.items():  # zero-copy
            columns[name] = value.slice(0, some.num_rows)
        for name in some.column_names:
            columns.setdefault(name, some[name])
        yield pa.table([columns[field.name].cast(field.type) for field in schema], schema=schema)


def _outcomes(
    spec: JobSpec, rejected: pa.ChunkedArray, outputs: pa.Table
) -> dict[str, pa.ChunkedArray]:
    """The columns `error` and `status`, by name.

    Args:
        spec: the job's.
        rejected: why a row can't be prompted; null if it can.
        outputs: the rows' outputs, with the columns of a part; all null without one.
    """
    failed = outputs[ERROR_COLUMN]
    errors = pc.coalesce(rejected, failed)
    is_cut_off = pc.equal(outputs["finish_reason"], "length")
    conditions = {
        "rejected": pc.is_valid(rejected),
        INVALID_OUTPUT: pc.equal(pc.struct_field(errors, "kind"), INVALID_OUTPUT),
        "failed": pc.is_valid(failed),
        "cut_off": pc.and_(is_cut_off, pa.scalar(spec.ends_answers)),
    }
    status = pc.case_when(pc.make_struct(*conditions.values()), *conditions, "ok")
    return {ERROR_COLUMN: errors, STATUS_COLUMN: status}
