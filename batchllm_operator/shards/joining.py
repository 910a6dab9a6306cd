"""Outputs of finished plans, put beside the rows that they are for."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.amounts import counted
from batchllm_operator.answers import Answers
from batchllm_operator.errors import IncompleteRunError, PlanError
from batchllm_operator.lake import published_schema
from batchllm_operator.row_error import INVALID_OUTPUT, REPETITION, SKIPPED
from batchllm_operator.shards.buckets import (
    Outputs,
    output_schema,
    read_asked,
    read_bucket,
    spread,
)
from batchllm_operator.shards.parts import STATUS_COLUMN, ShardParts, part_schema
from batchllm_operator.shards.reuse_index import ReusedOutputs
from batchllm_operator.spec import JobSpec
from batchllm_operator.stored_plan.manifest import ERROR_COLUMN, ROWS_FILE, errors_of
from batchllm_operator.stored_plan.rounds import plans_of_rounds
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import ahead

_BATCH_ROWS: Final = 1 << 16
_SLICE_ROWS: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A plan with all of its parts."""

    plan: StoredPlan
    shards: Sequence[ShardParts]

    @classmethod
    def of(cls, plan: StoredPlan) -> Self:
        """Raises `IncompleteRunError`: parts are missing; names the shards to run."""
        return cls(plan, _finished_shards(plan))

    @property
    def asked(self) -> tuple[int, ...]:
        """Numbers of the questions of this round, none if the job has one prompt without a name."""
        manifest = self.plan.manifest
        return manifest.spec.rounds[manifest.round_idx] if manifest.spec.prompts else ()

    @property
    def outputs(self) -> list[ShardParts | ReusedOutputs]:
        return [*self.shards, ReusedOutputs(self.plan)]


def finished_rounds(plan: StoredPlan) -> list[FinishedRound]:
    """The plan's own round, after those before it; raises as `FinishedRound.of`."""
    return [FinishedRound.of(each) for each in plans_of_rounds(plan)]


def outputs_of(rounds: Sequence[FinishedRound]) -> list[ShardParts | ReusedOutputs]:
    return [outputs for each in rounds for outputs in each.outputs]


def _finished_shards(plan: StoredPlan) -> list[ShardParts]:
    shards = [ShardParts.read(plan, shard_idx) for shard_idx in range(len(plan.manifest.shards))]
    unfinished = [
        f"shard {shard_idx} ({len(stored.entries)} of {counted(planned.num_parts, 'part')})"
        for shard_idx, (planned, stored) in enumerate(
            zip(plan.manifest.shards, shards, strict=True)
        )
        if {entry.part_idx for entry in stored.entries} != set(range(planned.num_parts))
    ]
    if unfinished:
        raise IncompleteRunError(
            f"plan {plan.folder.uri}: unfinished: {', '.join(unfinished)}; run"
            f" `batchllm run --plan {plan.folder.uri}`, then commit again"
        )
    return shards


def model_name(spec: JobSpec) -> str:
    """The value of the output column `model`: path, and revision if the spec names one."""
    return f"{spec.model.path}@{spec.model.revision}" if spec.model.revision else spec.model.path


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

    def all_tables(
        self, plan: StoredPlan, sources: Sequence[Outputs], spool: Path
    ) -> Generator[pa.Table]:
        """All published rows in order, with buckets in the local folder `spool`; see `tables`."""
        spec, num = plan.manifest.spec, len(plan.manifest.spec.questions)
        num_asks = plan.manifest.counts.num_rows
        paths, asks_each = spread(sources, part_schema(spec), num_asks, spool, num)
        buckets = ahead(paths, read_bucket, num_threads=1)
        yield from self.tables(plan, 0, None, asks_each // num, buckets)

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
    failed, reason = outputs[ERROR_COLUMN], pc.struct_field(rejected, "kind")
    is_skipped = pc.fill_null(pc.equal(reason, SKIPPED), False)
    rejected = pc.if_else(is_skipped, pa.scalar(None, rejected.type), rejected)
    errors = pc.coalesce(rejected, failed)
    is_cut_off = pc.equal(outputs["finish_reason"], "length")
    conditions = {
        SKIPPED: is_skipped,
        "rejected": pc.is_valid(rejected),
        INVALID_OUTPUT: pc.equal(pc.struct_field(errors, "kind"), INVALID_OUTPUT),
        "failed": pc.is_valid(failed),
        REPETITION: pc.equal(outputs["finish_reason"], REPETITION),
        "cut_off": pc.and_(is_cut_off, pa.scalar(question.ends_answers)),
    }
    status = pc.case_when(pc.make_struct(*conditions.values()), *conditions, "ok")
    return {ERROR_COLUMN: errors, STATUS_COLUMN: status}
