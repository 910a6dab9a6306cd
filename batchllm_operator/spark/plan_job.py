"""The plan stage on Spark: the same plan as `plan.plan_job` makes, in ranges.

    driver  snapshot -> parts                                        (`reading`)
    tasks   keys of rows -> numbers of rows; keys are unique         (`reading`)
    tasks   a sample of prompts                                      (`prompts`)
    driver  sample -> boundaries of ranges                           (`ranges`)
    tasks   rows -> prompts -> shuffled by range, sorted             (`prompts`)
    tasks   each range: prefix tree -> groups -> shards              (`range_task`)
    driver  tasks' reports -> manifest, written last

Prompts go through Spark's shuffle, files from tasks to the lake; the driver holds counts of ranges
and files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.errors import SpecError
from batchllm_operator.lake import VersionedTable, open_table
from batchllm_operator.plan.given import Given, find_given
from batchllm_operator.plan.output_lengths import learn_output_lengths
from batchllm_operator.plan.plan_job import complete, describe_plan
from batchllm_operator.plan.rows.prompting import sample_tokens, warn_of_doubled_start
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.shards.row_errors import WrittenRows
from batchllm_operator.spark.commit_run import MOST_ROWS_OF_ONE_FILE
from batchllm_operator.spark.prompts import Task, draw_sample, make_prompts
from batchllm_operator.spark.range_task import RangeResult, plan_ranges
from batchllm_operator.spark.ranges import choose_ranges, common_tokens, num_ranges
from batchllm_operator.spark.reading import Reading, number_rows, parts_of
from batchllm_operator.spark.session import spark_session
from batchllm_operator.spark.staging import Staging
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import rows_file
from batchllm_operator.stored_plan.shard_files import shard_file
from batchllm_operator.stored_plan.stored_plan import StoredPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PHASES: Final = ("count rows, check keys", "choose ranges", "write shards", "name files")
_log = logging.getLogger(__name__)


def plan_on_spark(spec: JobSpec, ds: str) -> StoredPlan:
    """Plan the job for partition `ds` on Spark; see `plan.plan_job.plan_job`.

    The plan depends neither on the number of executors nor on tasks that were repeated. Nothing
    is in its folder before all files are written.

    Raises as `plan_job`, `spark_session` and `rows_of`; `SpecError` if a setting isn't for Spark.
    """
    if len(spec.rounds) > 1:
        raise SpecError(
            "prompts: those that need answers to others aren't for planner.engine: spark yet; plan"
            " locally"
        )
    if spec.reuse_outputs:
        raise SpecError(
            "reuse_outputs: isn't for planner.engine: spark yet; leave it out, or plan locally"
        )
    if spec.prompt is not None and spec.prompt.fields is not None:
        raise SpecError("prompt.fields: isn't for planner.engine: spark yet; plan locally")
    given = find_given(spec, ds)
    for asked, tokenizer in zip(given.spec.questions, given.tokenizers, strict=True):
        warn_of_doubled_start(asked, sample_tokens(asked, tokenizer), tokenizer)
    staging = Staging.beside(spec, ds)
    try:
        with spark_session(spec) as spark:
            staging.open(spark)
            try:
                return _plan(spark, given, staging, is_exact=False)
            except TokenIdsDifferError as error:
                _log.warning("%s: planning starts again", error)
            return _plan(spark, given, staging, is_exact=True)
    except BaseException:
        staging.close()
        raise
    finally:
        staging.remove()  # after the session's end


def _warn_of_one_process(spec: JobSpec, num_rows: int) -> None:
    if spec.expect:
        _log.warning(
            "expect: one process, the driver's, joins and measures all %s rows when it commits;"
            " give it disk for their outputs twice, or leave expect out",
            f"{num_rows:,}",
        )
    if num_rows <= MOST_ROWS_OF_ONE_FILE:
        return
    table = open_table(spec.output.uri, spec.input.partition_column)
    if not isinstance(table, VersionedTable):
        _log.warning(
            "output %s: a partition of plain Parquet is one file, and Spark won't commit one of"
            " %s rows; give the job an Iceberg or Delta table, or commit with --on local",
            table.uri,
            f"{num_rows:,}",
        )


def _plan(spark: SparkSession, given: Given, staging: Staging, *, is_exact: bool) -> StoredPlan:
    """Raises `TokenIdsDifferError` unless `is_exact`; see `Reading`."""
    spec, ds = given.spec, given.ds
    reading = Reading.of(given, is_exact=is_exact)
    parts = parts_of(given.table, given.table.narrowed(given.snapshot, spec.input.filter))
    with Progress("plan on Spark", len(PHASES), unit="phases") as progress:
        progress.advance(0, PHASES[0])
        numbers = number_rows(spark, reading, parts)
        _warn_of_one_process(spec, numbers.num_rows)
        progress.advance(1, PHASES[1])
        sample = draw_sample(spark, reading, parts, numbers)
        num = num_ranges(numbers.num_asks, sample)
        ranges = choose_ranges(sample, num, spec.planner.num_shards)
        del sample  # may be a quarter of a gigabyte
        learned = learn_output_lengths(spec, ds, by_group=False)
        task = Task(reading, numbers, staging, ranges, given.range_planner(learned))
        progress.advance(1, PHASES[2])
        rows, planned = plan_ranges(make_prompts(spark, task, parts), task)
        given.table.check_unchanged(given.snapshot)
        num_prompts = sum(result.planned.num_prompts for result in planned)
        row_counts = {name: sum(part.counts[name] for part in rows) for name in rows[0].counts}
        num_asked = numbers.num_asks - row_counts["num_unasked_rows"]
        row_counts |= {"num_rejected_rows": num_asked - num_prompts, "num_reused_rows": 0}
        names = [part.file.name for part in rows]
        folder = Folder.open(staging.uri)
        written = WrittenRows(folder, names, spec.input.key, tuple(spec.prompts))
        given.check_rows(row_counts, written)
        shard_files = [file for result in planned for file in result.files]
        files = {rows_file(idx): part.file for idx, part in enumerate(rows)}
        files |= {shard_file(idx): file for idx, file in enumerate(shard_files)}
        manifest = describe_plan(
            given,
            [result.planned for result in planned],
            row_counts,
            {name: file.described for name, file in files.items()},
            learned,
            row_parts=tuple(part.file.num_rows for part in rows),
            num_twice=_num_twice(planned, block_size_of(spec)),
        )
        named = [(file.name, name) for name, file in files.items()]
        progress.advance(1, PHASES[3])
        plan = complete(manifest, lambda folder: staging.name_files(spark, named, folder))
        progress.advance(1)
        return plan


def _num_twice(ranges: Sequence[RangeResult], block_size: int) -> int:
    """Tokens that first prompts of ranges share with the last ones before, in whole blocks."""
    total = 0
    for before, after in pairwise(ranges):
        last, first = bytes.fromhex(before.last), bytes.fromhex(after.first)
        shared = min(common_tokens(last, first), len(first) // 4 - 1)
        total += max(shared, 0) // block_size * block_size
    return total
