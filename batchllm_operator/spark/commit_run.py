"""The commit stage on Spark: outputs go back to the order of the rows, and become data files.

driver  ledgers of shards -> parts                           (`commit.commit_run`)
tasks   parts -> a row for each of a request's rows -> shuffled by range of rows, sorted
tasks   each range: checked, joined with its keys -> data files beside the table's
driver  one atomic commit that refers to them                (`commit.commit_run`)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.partition import write_partition
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
from batchllm_operator.shards.buckets import (
    BUCKET_ROWS,
    ROW_FIELD,
    one_per_row,
    output_fields,
)
from batchllm_operator.shards.joining import Joining
from batchllm_operator.shards.parts import PartEntry, ShardParts, part_schema
from batchllm_operator.shards.quarantine import QUARANTINED_FILE
from batchllm_operator.shards.reuse_index import ReusedOutputs
from batchllm_operator.spark.session import spark_session
from batchllm_operator.spark.staging import scratch_folder
from batchllm_operator.spark.tasks import Batches, mapped, rows_of, tasks
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.run_report import RunReport
from batchllm_operator.stored_plan.stored_plan import StoredPlan
from batchllm_operator.streams import batches_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_TASK_ROWS: Final = 1 << 16
_BYTES_PER_TOKEN: Final = 5
_FILES: Final = pa.schema(
    {"range": pa.int32(), "name": pa.string(), "size_bytes": pa.int64(), "footer": pa.binary()}
)
"""Columns of what tasks say of data files."""
MOST_ROWS_OF_ONE_FILE: Final = 20_000_000
"""Of a partition of plain Parquet."""


def commit_on_spark(plan_uri: str, *, accept: bool = False) -> RunReport:
    """Publish the outputs of a finished plan on Spark; see `commit.commit_run.commit_run`.

    A table whose partitions are one file each (plain Parquet) is committed by the driver alone,
    unless that is too large (`TableError`). Spark starts only when there are data files to write.

    Raises as `commit_run`, `spark_session` and `rows_of`.
    """
    return commit_run(plan_uri, _write, accept=accept)


def _write(
    plan: StoredPlan,
    sources: Sequence[ShardParts | ReusedOutputs],
    spool: Path,
    table: LakeTable,
) -> Path | StagedRows:
    """Write the partition's data files; see `write_partition`."""
    spec, num_rows = plan.manifest.spec, plan.manifest.num_rows
    # What is expected is measured in local files, by which quarantine is undone, too.
    if spec.expect or plan.folder.exists(QUARANTINED_FILE):
        return write_partition(plan, sources, spool, table)
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
        return StagedRows(staging, ())
    with spark_session(spec) as spark:
        _log.info("joining outputs with rows: %d data files or more", num_ranges)
        files = _joined(spark, plan, sources, joining, staging, rows_each, num_ranges)
    return StagedRows(staging, tuple(files))


def _rows_each(plan: StoredPlan, sources: Sequence[ShardParts | ReusedOutputs]) -> int:
    """Rows of a range: about a data file of the target size, whole buckets."""
    shards = [source for source in sources if isinstance(source, ShardParts)]
    num_tokens = sum(entry.num_output_tokens for shard in shards for entry in shard.entries)
    num_rows = max(1, plan.manifest.num_rows)
    stored = sum(plan.manifest.files[rows.file].size_bytes for rows in plan.manifest.row_files)
    num_bytes = stored + num_tokens * _BYTES_PER_TOKEN
    wanted = plan.manifest.spec.output.target_file_bytes * num_rows // max(1, num_bytes)
    return max(1, min(wanted, num_rows) // BUCKET_ROWS) * BUCKET_ROWS


@dataclass(frozen=True, slots=True)
class _Source:
    """What a task reads: some parts of a shard, or the outputs that the plan has reused."""

    folder: str
    """The shard's, or the plan's."""
    entries: tuple[PartEntry, ...] | None = None

    def open(self) -> ShardParts | ReusedOutputs:
        if self.entries is None:
            return ReusedOutputs(StoredPlan.open(self.folder))
        return ShardParts(Folder.open(self.folder), self.entries)


def _cut(sources: Sequence[ShardParts | ReusedOutputs]) -> Iterator[_Source]:
    """Sources for tasks."""
    for source in sources:
        if isinstance(source, ReusedOutputs):
            yield _Source(source.plan.folder.uri)
            continue
        for entries in batches_of(source.entries, (_TASK_ROWS, attrgetter("num_rows"))):
            yield _Source(source.folder.uri, tuple(entries))


def _joined(
    spark: SparkSession,
    plan: StoredPlan,
    sources: Sequence[ShardParts | ReusedOutputs],
    joining: Joining,
    staging: Staging,
    rows_each: int,
    num_ranges: int,
) -> list[StagedFile]:
    """Write the data files of each range; returns them in row order."""
    from pyspark.sql.functions import col

    fields = pa.schema([ROW_FIELD, *output_fields(part_schema(plan.manifest.spec))])
    # Spark's texts are `string`s.
    kinds = [pa.string() if kind == pa.large_string() else kind for kind in fields.types]
    sent = pa.schema([("range", pa.int32()), *zip(fields.names, kinds, strict=True)])
    plan_uri, num_rows = plan.folder.uri, plan.manifest.num_rows
    num = len(plan.manifest.spec.questions)
    most, bucket_rows = plan.manifest.spec.output.target_file_bytes, BUCKET_ROWS

    def outputs(source: _Source) -> Iterator[pa.RecordBatch]:
        for part in source.open().parts(["row_idxs", *fields.names[1:]]):
            for rows in one_per_row(part, fields):
                numbers = pc.cast(pc.divide(rows["row_idx"], rows_each * num), pa.int32())
                if (last := pc.max(numbers).as_py()) is not None and last >= num_ranges:
                    raise PlanError(f"a part answers a row beyond the plan's {num_rows}")
                table = rows.add_column(0, "range", numbers)
                yield from table.cast(sent).combine_chunks().to_batches()

    def write(batches: Batches) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        number = context.partitionId()
        first, end = number * rows_each, min((number + 1) * rows_each, num_rows)
        buckets = _buckets(batches, fields, first * num, end * num, bucket_rows * num)
        tables = joining.tables(StoredPlan.open(plan_uri), first, end, bucket_rows, buckets)
        with scratch_folder() as scratch:
            write_files(gather(tables, most), scratch / "data", joining.schema, most)
            for file in staging.put(scratch / "data", number):
                sink = pa.BufferOutputStream()
                file.footer.write_metadata_file(sink)
                row = [[number], [file.name], [file.size_bytes], [sink.getvalue().to_pybytes()]]
                yield pa.record_batch(row, schema=_FILES)

    frame = tasks(spark, list(_cut(sources)), _Source, outputs, sent)
    dealt = frame.repartitionById(num_ranges, col("range")).sortWithinPartitions("row_idx")
    rows = rows_of(mapped(dealt, write, _FILES))
    return [
        StagedFile(row.name, row.size_bytes, pq.read_metadata(pa.BufferReader(row.footer)))
        for row in sorted(rows, key=attrgetter("range"))  # stable
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
