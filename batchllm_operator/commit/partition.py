"""The published partition's rows: outputs sorted by row, checked, and joined with their keys."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import Answers
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import LakeTable, gather, published_schema, write_files
from batchllm_operator.row_error import INVALID_OUTPUT
from batchllm_operator.shards.buckets import Outputs, output_schema, read_all, read_bucket, spread
from batchllm_operator.shards.parts import STATUS_COLUMN, part_schema
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, ROWS_FILE
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

_BATCH_ROWS: Final = 1 << 16
_SLICE_ROWS: Final = 1 << 13


def model_name(spec: JobSpec) -> str:
    """The value of the output column `model`: path, and revision if the spec names one."""
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path


def write_partition(
    plan: StoredPlan, sources: Sequence[Outputs], spool: Path, table: LakeTable
) -> Path:
    """Write the partition's rows, in input order, to files in a folder; returns the folder.

    Memory is one bucket of rows and two row groups, whatever the number of rows; see `spread` and
    `write_files`. The local folder `spool` holds both; `table` tells how large a file may be.
    Raises `PlanError`: a row has no output, or more than one.
    """
    joining = Joining(plan, sources)
    num_rows = plan.manifest.counts.num_rows
    paths, rows_each = spread(sources, part_schema(plan.manifest.spec), num_rows, spool)
    most = table.most_file_bytes
    buckets = ahead(paths, read_bucket, num_threads=1)
    tables = joining.tables(plan, 0, None, rows_each, buckets)
    write_files(gather(tables, most), spool / "data", joining.schema, most)
    return spool / "data"


class Joining:
    """Puts `sources`, all outputs of a plan's rows, beside these rows.

    Raises `PlanError`: the plan lacks columns that the job keeps.
    """

    def __init__(self, plan: StoredPlan, sources: Sequence[Outputs]) -> None:
        spec, planned, rows_schema = plan.manifest.spec, plan.manifest.answers, plan.rows_schema()
        if missing := sorted(set(spec.kept_columns).difference(rows_schema.names)):
            raise PlanError(
                f"plan {plan.folder.uri}: {ROWS_FILE} lacks {', '.join(missing)}; make the plan"
                " again"
            )
        self.schema = published_schema(output_schema(spec, rows_schema, planned), plan.publication)
        self._spec, self._names = spec, rows_schema.names
        self._answers = Answers.of(spec, planned).over(partial(read_all, sources))
        self._constants = {"model": model_name(spec), "run_id": plan.publication.run_id}

    def tables(
        self,
        plan: StoredPlan,
        first_row: int,
        end_row: int | None,
        num_rows_each: int,
        buckets: Iterable[pa.Table],
    ) -> Iterator[pa.Table]:
        """The published rows [first_row, end_row), in order.

        The outputs of a bucket, for `num_rows_each` rows but in the last, are sorted by `row_idx`.
        Raises `PlanError`: a row has no output, or more than one.
        """
        size = min(num_rows_each, _BATCH_ROWS)
        batches = plan.row_batches(self._names, first_row, end_row, batch_size=size)
        for rows, outputs in zip(_rebatched(batches, num_rows_each), buckets, strict=True):
            yield from self._joined(rows, outputs, first_row)
            first_row += rows.num_rows

    def _joined(self, rows: pa.Table, outputs: pa.Table, start: int) -> Iterator[pa.Table]:
        """Put each row's output beside it; rows that couldn't be prompted have none."""
        prompted = rows[ERROR_COLUMN].is_null().to_numpy()
        expected, found = np.flatnonzero(prompted) + start, outputs["row_idx"].to_numpy()
        if not np.array_equal(expected, found):
            repeated = found[1:][found[1:] == found[:-1]]
            wrong = repeated if len(repeated) else np.setxor1d(expected, found)
            raise PlanError(
                f"row {wrong[0]} has {np.count_nonzero(found == wrong[0])} outputs where the plan"
                f" wants {np.count_nonzero(expected == wrong[0])}; {len(wrong)} such rows; nothing"
                " was published"
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
            columns = {name: some[name] for name in some.column_names}
            columns |= {name: joined[name] for name in joined.column_names}
            columns |= self._answers.columns(joined)
            columns |= _outcomes(self._spec, some[ERROR_COLUMN], joined)
            for name, value in self._constants.items():
                columns[name] = pa.repeat(value, some.num_rows)
            cast = [columns[field.name].cast(field.type) for field in self.schema]
            yield pa.table(cast, schema=self.schema)


def _rebatched(batches: Iterable[pa.RecordBatch], num_rows_each: int) -> Iterator[pa.Table]:
    """The same rows in tables of `num_rows_each`, the last one shorter."""
    kept: list[pa.RecordBatch] = []
    num_kept = 0
    for batch in batches:
        while num_kept + batch.num_rows >= num_rows_each:
            head = batch.slice(0, num_rows_each - num_kept)
            yield pa.Table.from_batches([*kept, head])
            batch = batch.slice(head.num_rows)
            kept, num_kept = [], 0
        if batch.num_rows:
            kept.append(batch)
            num_kept += batch.num_rows
    if kept:
        yield pa.Table.from_batches(kept)


def _outcomes(
    spec: JobSpec, rejected: pa.ChunkedArray, outputs: pa.Table
) -> dict[str, pa.ChunkedArray]:
    """The columns `error` and `status`, by name; `rejected` says why a row can't be prompted."""
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
