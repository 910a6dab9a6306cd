"""The commit stage on Spark: outputs go back to the order of the rows, and become data files.

driver  ledgers of shards -> parts                           (`commit.commit_run`)
tasks   parts -> a row for each of a request's rows -> shuffled by range of rows, sorted
tasks   each range: checked, joined with its keys -> data files beside the table's
driver  one atomic commit that refers to them                (`commit.commit_run`)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.partition import Joining, write_partition
from batchllm_operator.errors import PlanError, TableError
from batchllm_operator.lake import (
    LakeTable,
    StagedFile,
    StagedRows,
    Staging,
    VersionedTable,
    gather,
    write_files,
)
from batchllm_operator.progress import Progress
from batchllm_operator.shards.buckets import (
    BUCKET_ROWS,
    ROW_FIELD,
    one_per_row,
    output_fields,
)
from batchllm_operator.shards.parts import PartEntry, ShardParts, part_schema
from batchllm_operator.shards.reuse_index import ReusedOutputs
from batchllm_operator.spark.session import spark_session
from batchllm_operator.spark.staging import scratch_folder
from batchllm_operator.spark.tasks import (
    Batches,
    counted,
    mapped,
    payloads_in,
    reported,
    reports_of,
    tasks,
)
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import batches_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASK_ROWS: Final = 1 << 16
_BYTES_PER_TOKEN: Final = 5
MOST_ROWS_OF_ONE_FILE: Final = 20_000_000
"""Of a partition of plain Parquet."""


def commit_on_spark(plan_uri: str) -> RunReport:
    """Publish the outputs of a finished plan on Spark; see `commit.commit_run.commit_run`.

    A table whose partitions are one file each (plain Parquet) is committed by the driver alone.
    Spark starts only when there are data files to write.

    Raises:
        TableError: as `commit_run`; or such a partition is too large for that.
        BatchLLMError: as `commit_run`; or see `spark_session` and `reports_of`.
    """
    return commit_run(plan_uri, _write)


def _write(
    plan: StoredPlan,
    sources: Sequence[ShardParts | ReusedOutputs],
    spool: Path,
    table: LakeTable,
) -> Path | StagedRows:
    """Write the partition's data files; see `write_partition`."""
    spec, num_rows = plan.manifest.spec, plan.manifest.counts.num_rows
    joining = Joining(plan, sources)
    add_columns = spec.output.add_columns
    if not isinstance(table, VersionedTable):
        if num_rows > MOST_ROWS_OF_ONE_FILE:
            raise TableError(
                f"output {table.uri}: a partition of plain Parquet is one file, and {num_rows:,}"
                " rows are too many for one; give the job an Iceberg or Delta table, or"
                " commit with --on local"
            )
        return write_partition(plan, sources, spool, table)
    staging = table.staging(plan.manifest.ds, joining.schema, add_columns=add_columns)
    rows_each = _rows_each(plan, sources)
    num_ranges = -(-num_rows // rows_each)
    if num_ranges == 0:
        return staging.rows([])
    payloads = list(_payloads(sources))
    num_tasks = len(payloads) + num_ranges
    with (
        spark_session(spec) as spark,
        Progress("commit on Spark", num_tasks, unit="tasks") as progress,
        counted(spark, progress, num_tasks, "join outputs with rows"),
    ):
        written = _joined(spark, plan, payloads, joining, staging, rows_each, num_ranges)
    return staging.rows([file for _, files in sorted(written, key=itemgetter(0)) for file in files])


def _rows_each(plan: StoredPlan, sources: Sequence[ShardParts | ReusedOutputs]) -> int:
    """Rows of a range: about a data file of the target size, whole buckets."""
    shards = [source for source in sources if isinstance(source, ShardParts)]
    num_tokens = sum(entry.num_output_tokens for shard in shards for entry in shard.entries)
    num_rows = max(1, plan.manifest.counts.num_rows)
    stored = sum(plan.manifest.files[rows.file].size_bytes for rows in plan.manifest.row_files)
    num_bytes = stored + num_tokens * _BYTES_PER_TOKEN
    wanted = plan.manifest.spec.output.target_file_bytes * num_rows // max(1, num_bytes)
    return max(1, min(wanted, num_rows) // BUCKET_ROWS) * BUCKET_ROWS


def _payloads(sources: Sequence[ShardParts | ReusedOutputs]) -> Iterator[bytes]:
    """What tasks are given: some parts of a shard, or the outputs that the plan has reused."""
    for source in sources:
        if isinstance(source, ReusedOutputs):
            yield json.dumps({"reused": source.plan.folder.uri}).encode()
            continue
        for entries in batches_of(source.entries, (_TASK_ROWS, attrgetter("num_rows"))):
            listed = [entry.model_dump(mode="json") for entry in entries]
            yield json.dumps({"folder": source.folder.uri, "entries": listed}).encode()


def _source(payload: bytes) -> ShardParts | ReusedOutputs:
    given = json.loads(payload)
    if "reused" in given:
        return ReusedOutputs(StoredPlan.open(given["reused"]))
    entries = [PartEntry.model_validate(entry) for entry in given["entries"]]
    return ShardParts(Folder.open(given["folder"]), entries)


def _joined(
    spark: SparkSession,
    plan: StoredPlan,
    payloads: Sequence[bytes],
    joining: Joining,
    staging: Staging,
    rows_each: int,
    num_ranges: int,
) -> list[tuple[int, list[StagedFile]]]:
    """Write the data files of each range; returns its number and their entries.

    Raises `PlanError`: outputs and rows aren't one to one.
    """
    from pyspark.sql.functions import col

    fields = pa.schema([ROW_FIELD, *output_fields(part_schema(plan.manifest.spec))])
    # Spark's texts are `string`s.
    kinds = [pa.string() if kind == pa.large_string() else kind for kind in fields.types]
    sent = pa.schema([("range", pa.int32()), *zip(fields.names, kinds, strict=True)])
    plan_uri, num_rows = plan.folder.uri, plan.manifest.counts.num_rows
    most, bucket_rows = plan.manifest.spec.output.target_file_bytes, BUCKET_ROWS

    def outputs(batches: Batches) -> Iterator[Any]:
        for payload in payloads_in(batches):
            for part in _source(payload).parts(["row_idxs", *fields.names[1:]]):
                for rows in one_per_row(part, fields):
                    numbers = pc.cast(pc.divide(rows["row_idx"], rows_each), pa.int32())
                    if (last := pc.max(numbers).as_py()) is not None and last >= num_ranges:
                        raise PlanError(f"a part answers a row beyond the plan's {num_rows}")
                    table = rows.add_column(0, "range", numbers)
                    yield from table.cast(sent).combine_chunks().to_batches()

    def write(batches: Batches) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number = context.partitionId()
        first, end = number * rows_each, min((number + 1) * rows_each, num_rows)
        buckets = _buckets(batches, fields, first, end, bucket_rows)
        tables = joining.tables(StoredPlan.open(plan_uri), first, end, bucket_rows, buckets)
        with scratch_folder() as scratch:
            write_files(gather(tables, most), scratch / "data", joining.schema, most)
            files = staging.put(scratch / "data", number)
        described = [file.to_json() for file in files]
        yield reported([json.dumps([number, described]).encode()])

    frame = mapped(tasks(spark, payloads), outputs, sent)
    dealt = frame.repartitionById(num_ranges, col("range")).sortWithinPartitions("row_idx")
    return [
        (number, list(map(StagedFile.of_json, files)))
        for number, files in map(json.loads, reports_of(dealt, write))
    ]


def _buckets(
    batches: Batches, fields: pa.Schema, first: int, end: int, num_rows_each: int
) -> Iterator[pa.Table]:
    """Sorted outputs of a range, cut into buckets; empty ones, too."""
    following = 0
    for number, pieces in groupby(_pieces(batches, first, num_rows_each), itemgetter(0)):
        yield from repeat(fields.empty_table(), number - following)
        table = pa.Table.from_batches([piece for _, piece in pieces])
        yield table.cast(fields).combine_chunks()
        following = number + 1
    yield from repeat(fields.empty_table(), -(-(end - first) // num_rows_each) - following)


def _pieces(
    batches: Batches, first: int, num_rows_each: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Sorted outputs, cut where a bucket begins, with the number of their bucket."""
    for batch in batches:
        if batch.num_rows:
            numbers = (batch.column("row_idx").to_numpy() - first) // num_rows_each
            starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
            for start, stop in pairwise([*starts, batch.num_rows]):
                piece = batch.slice(start, stop - start)
                yield int(numbers[start]), piece.drop_columns(["range"])
