"""The published partition's rows: outputs sorted by row, checked, and joined with their keys."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.answers import Answers
from batchllm_operator.errors import PlanError
from batchllm_operator.lake import LakeTable, gather, published_schema, write_files
from batchllm_operator.row_error import INVALID_OUTPUT
from batchllm_operator.shards.buckets import Outputs, output_schema, read_asked, read_bucket, spread
from batchllm_operator.shards.parts import STATUS_COLUMN, part_schema
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, ROWS_FILE, errors_of
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
    spec, num = plan.manifest.spec, len(plan.manifest.spec.questions)
    num_asks = plan.manifest.counts.num_rows
    paths, asks_each = spread(sources, part_schema(spec), num_asks, spool, num)
    most = table.most_file_bytes
    buckets = ahead(paths, read_bucket, num_threads=1)
    tables = joining.tables(plan, 0, None, asks_each // num, buckets)
    write_files(gather(tables, most), spool / "data", joining.schema, most)
    return spool / "data"


class Joining:
    """Puts `sources`, all outputs of a plan's rows, beside these rows.

    Raises `PlanError`: the plan lacks columns that the job keeps.
    """

    def __init__(self, plan: StoredPlan, sources: Sequence[Outputs]) -> None:
        manifest, rows_schema = plan.manifest, plan.rows_schema()
        spec, planned = manifest.spec, manifest.planned_answers
        if missing := sorted(set(spec.kept_columns).difference(rows_schema.names)):
            raise PlanError(
                f"plan {plan.folder.uri}: {ROWS_FILE} lacks {', '.join(missing)}; make the plan"
                " again"
            )
        self.schema = published_schema(output_schema(spec, rows_schema, planned), plan.publication)
        self._names, self._prompts = rows_schema.names, tuple(spec.prompts)
        self._questions, num = spec.questions, len(spec.questions)
        self._answers = [
            answers.over(partial(read_asked, sources, number, num))
            for number, answers in enumerate(Answers.of_all(spec, planned))
        ]
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
        """Put each row's outputs beside it; rows that couldn't be prompted have none."""
        num, rejected = len(self._questions), errors_of(rows)
        prompted = rejected.is_null().to_numpy(zero_copy_only=False)
        for number, name in enumerate(self._prompts):
            if name in self._names:  # answers that the plan has taken
                prompted[number::num] &= rows[name].is_null().to_numpy()
        expected, found = np.flatnonzero(prompted) + start * num, outputs["row_idx"].to_numpy()
        if not np.array_equal(expected, found):
            repeated = found[1:][found[1:] == found[:-1]]
            wrong = repeated if len(repeated) else np.setxor1d(expected, found)
            raise PlanError(
                f"row {wrong[0] // num} has {np.count_nonzero(found == wrong[0])} outputs where the"
                f" plan wants {np.count_nonzero(expected == wrong[0])}; {len(wrong)} such rows;"
                " nothing was published"
            )
        outputs = outputs.drop_columns("row_idx")  # a key may have the same name
        place, is_simple = np.cumsum(prompted) - 1, num == 1 and bool(prompted.all())
        for first in range(0, rows.num_rows, _SLICE_ROWS):
            some = rows.slice(first, _SLICE_ROWS)
            columns: dict[str, Any] = {name: some[name] for name in some.column_names}
            for number in range(num):
                asks = np.arange(first, first + some.num_rows) * num + number
                if is_simple:
                    joined = outputs.slice(first, _SLICE_ROWS)
                else:
                    joined = outputs.take(pa.array(place[asks], mask=~prompted[asks]))
                columns |= self._answered(number, rejected.take(pa.array(asks)), joined, some)
            for name, value in self._constants.items():
                columns[name] = pa.repeat(value, some.num_rows)
            cast = [columns[field.name].cast(field.type) for field in self.schema]
            yield pa.table(cast, schema=self.schema)

    def _answered(
        self, number: int, rejected: pa.Array, outputs: pa.Table, rows: pa.Table
    ) -> dict[str, Any]:
        """Columns of the answers to a question, or the one that has them as a struct."""
        columns: dict[str, Any] = {name: outputs[name] for name in outputs.column_names}
        columns |= self._answers[number].columns(outputs)
        columns |= _outcomes(self._questions[number], rejected, outputs)
        if not self._prompts:
            return columns
        name = self._prompts[number]
        fields = pa.schema(list(self.schema.field(name).type))
        answers = pa.table({field.name: columns[field.name] for field in fields}).cast(fields)
        structs = answers.to_struct_array()
        if name in self._names:
            structs = pc.coalesce(rows[name].cast(structs.type), structs)
        return {name: structs}


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
    question: JobSpec, rejected: pa.Array, outputs: pa.Table
) -> dict[str, pa.ChunkedArray]:
    """The columns `error` and `status`, by name; `rejected` says why a row can't be prompted."""
    failed = outputs[ERROR_COLUMN]
    errors = pc.coalesce(rejected, failed)
    is_cut_off = pc.equal(outputs["finish_reason"], "length")
    conditions = {
        "rejected": pc.is_valid(rejected),
        INVALID_OUTPUT: pc.equal(pc.struct_field(errors, "kind"), INVALID_OUTPUT),
        "failed": pc.is_valid(failed),
        "cut_off": pc.and_(is_cut_off, pa.scalar(question.ends_answers)),
    }
    status = pc.case_when(pc.make_struct(*conditions.values()), *conditions, "ok")
    return {ERROR_COLUMN: errors, STATUS_COLUMN: status}
