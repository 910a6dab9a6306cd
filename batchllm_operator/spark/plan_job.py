"""The plan stage on Spark: the same plan as `plan.plan_job` makes, in ranges.

    driver  snapshot -> parts                                        (`reading`)
    tasks   keys of rows -> numbers of rows; keys are unique         (`keys`)
    tasks   a sample of prompts                                      (`prompts`)
    driver  sample -> boundaries of ranges                           (`ranges`)
    tasks   rows -> prompts -> shuffled by range, sorted             (`prompts`)
    tasks   each range: prefix tree -> groups -> shards              (`shards`)
    driver  what tasks say -> manifest, written last

Prompts go through Spark's shuffle, files from tasks to the lake; the driver holds what is said
of ranges and files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchllm_operator.cost import Work, WorkArrays
from batchllm_operator.engine.gpus import block_size_of
from batchllm_operator.errors import SpecError
from batchllm_operator.lake import ParquetTable, open_table
from batchllm_operator.plan.estimate import estimate_work
from batchllm_operator.plan.given import Given, find_given
from batchllm_operator.plan.output_lengths import Learned, learn_output_lengths
from batchllm_operator.plan.plan_job import (
    PlanContent,
    complete,
    describe_plan,
    warn_of_control_tokens,
)
from batchllm_operator.plan.rows.doubled_start import sample_tokens, warn_of_doubled_start
from batchllm_operator.plan.rows.input_checks import check_rows, describe_rows
from batchllm_operator.prefixes import PlanSharing, imbalance
from batchllm_operator.prefixes.sharing import merged
from batchllm_operator.progress import Progress
from batchllm_operator.prompts import TokenIdsDifferError
from batchllm_operator.shards.row_errors import WrittenRows
from batchllm_operator.spark.commit_run import MOST_ROWS_OF_ONE_FILE
from batchllm_operator.spark.keys import RowNumbers, number_rows
from batchllm_operator.spark.live import counted
from batchllm_operator.spark.prompts import Task, draw_sample, make_prompts
from batchllm_operator.spark.ranges import choose_ranges, common_tokens, num_ranges
from batchllm_operator.spark.reading import Reading, parts_of
from batchllm_operator.spark.session import spark_session
from batchllm_operator.spark.shard_files import RangeTask, plan_ranges
from batchllm_operator.spark.staging import StagedFile, Staging
from batchllm_operator.spec import JobSpec
from batchllm_operator.storage import Folder
from batchllm_operator.stored_plan.manifest import (
    CostEstimate,
    DataFile,
    PlanCounts,
    ShardInfo,
    rows_file,
)
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

    Raises:
        BatchLLMError: as `plan_job`; or a setting isn't for Spark; or see `spark_session` and
            `said_by`.
    """
    _check(spec)
    given = find_given(spec, ds)
    warn_of_doubled_start(given.spec, sample_tokens(given.spec, given.tokenizer), given.tokenizer)
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


def _check(spec: JobSpec) -> None:
    if spec.reuse_outputs:
        raise SpecError(
            "reuse_outputs: isn't for planner.engine: spark yet; leave it out, or plan locally"
        )


def _warn_of_one_file(spec: JobSpec, num_rows: int) -> None:
    if num_rows <= MOST_ROWS_OF_ONE_FILE:
        return
    table = open_table(spec.output.uri, spec.input.partition_column)
    if isinstance(table, ParquetTable):
        _log.warning(
            "output %s: a partition of plain Parquet is one file, and Spark won't commit one of"
            " %s rows; give the job an Iceberg or Delta table, or commit with --on local",
            table.uri,
            f"{num_rows:,}",
        )


def _plan(spark: SparkSession, given: Given, staging: Staging, *, is_exact: bool) -> StoredPlan:
    """Raises `TokenIdsDifferError` unless `is_exact`; see `Task`."""
    spec, ds = given.spec, given.ds
    reading = Reading.of(spec, ds, given.snapshot, given.stored)
    parts = parts_of(given.table, given.snapshot)
    where = describe_rows(spec, given.table, given.snapshot)
    # Choosing ranges and naming files count as one each: they are short.
    with Progress("plan on Spark", 2 * len(parts) + 2, unit="tasks") as progress:
        with counted(spark, progress, len(parts), PHASES[0]):
            numbers = number_rows(spark, reading, parts, where)
        _warn_of_one_file(spec, numbers.num_rows)
        with counted(spark, progress, 1, PHASES[1]):
            sample = draw_sample(spark, reading, parts, numbers, is_exact=is_exact)
        num = num_ranges(numbers.num_rows, sample)
        ranges = choose_ranges(sample, num, spec.planner.num_shards)
        progress.extend(len(ranges))
        del sample  # may be a quarter of a gigabyte
        learned = _learn(spec, ds)
        shares = given.answers.reason_against_sharing is None
        task = Task(reading, numbers, staging, ranges, where, is_exact)
        about = RangeTask(task, learned, given.target, given.replicas, shares)
        with counted(spark, progress, len(parts) + len(ranges), PHASES[2]):
            found = plan_ranges(make_prompts(spark, task, parts), about)
        given.table.check_unchanged(given.snapshot)
        planned = _Planned.of(found, numbers)
        counts = planned.counts
        num_rows, num_rejected = counts.num_rows, counts.num_rejected_rows
        names = [file.name for file in planned.row_files]
        written = WrittenRows(Folder.open(staging.uri), names, spec.input.key)
        check_rows(spec, num_rows, num_rejected, given.table, given.snapshot, written)
        warn_of_control_tokens(spec, counts.num_control_rows)
        manifest = describe_plan(given, planned.content(given, learned))
        with counted(spark, progress, 1, PHASES[3]):
            return complete(
                manifest, lambda folder: staging.name_files(spark, planned.names, folder)
            )


def _learn(spec: JobSpec, ds: str) -> Learned | None:
    """Output lengths by the length of prompts; those by group aren't known on Spark."""
    learned = learn_output_lengths(spec, ds)
    if learned is None:
        return None
    by_length = learned.by_length.model_copy(update={"num_known_prefixes": 0})
    return Learned(by_length, None)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What tasks have said, in the order of rows and of ranges."""

    row_files: list[StagedFile]
    row_counts: list[dict[str, int]]
    """Of each file of rows: counts of the plan that only reading tells."""
    ranges: list[dict[str, Any]]
    num_rows: int

    @classmethod
    def of(cls, found: Sequence[dict[str, Any]], numbers: RowNumbers) -> _Planned:
        rows = sorted((each for each in found if "part" in each), key=itemgetter("part"))
        ranges = sorted((each for each in found if "range" in each), key=itemgetter("range"))
        files = [StagedFile.model_validate(each["file"]) for each in rows]
        return cls(files, [each["counts"] for each in rows], ranges, numbers.num_rows)

    @property
    def shard_files(self) -> list[StagedFile]:
        return [StagedFile.model_validate(file) for each in self.ranges for file in each["files"]]

    @property
    def names(self) -> list[tuple[str, str]]:
        """Each file's name in the staging folder, and in the plan."""
        rows = [(file.name, rows_file(idx)) for idx, file in enumerate(self.row_files)]
        return rows + [(file.name, shard_file(idx)) for idx, file in enumerate(self.shard_files)]

    @property
    def files(self) -> dict[str, DataFile]:
        described = [file.described for file in (*self.row_files, *self.shard_files)]
        return {new_name: each for (_, new_name), each in zip(self.names, described, strict=True)}

    @property
    def counts(self) -> PlanCounts:
        names = [*PlanCounts.model_fields]
        sums = {name: sum(each["counts"][name] for each in self.ranges) for name in names}
        num_prompts = sums["num_rows"]
        sums |= {"num_rows": self.num_rows, "num_rejected_rows": self.num_rows - num_prompts}
        sums |= {name: sum(n[name] for n in self.row_counts) for name in self.row_counts[0]}
        return PlanCounts(**sums)

    def num_stitched_tokens(self, block_size: int) -> int:
        """Tokens that first prompts of ranges share with the last ones before, in whole blocks.

        One engine, without a cut between ranges, wouldn't compute them again.
        """
        total = 0
        for before, after in pairwise(self.ranges):
            last, first = bytes.fromhex(before["last"]), bytes.fromhex(after["first"])
            shared = min(common_tokens(last, first), len(first) // 4 - 1)
            total += max(shared, 0) // block_size * block_size
        return total

    def content(self, given: Given, learned: Learned | None) -> PlanContent:
        """What the manifest says of the plan."""
        counts = self.counts
        stitched = self.num_stitched_tokens(block_size_of(given.spec))
        counts = counts.model_copy(
            update={"num_optimal_tokens": counts.num_optimal_tokens - stitched}
        )
        estimate, gpu_s = self._estimate(given)
        infos = [ShardInfo.model_validate(info) for each in self.ranges for info in each["shards"]]
        shards = tuple(
            info.model_copy(update={"file": shard_file(idx), "predicted_gpu_s": seconds})
            for idx, (info, seconds) in enumerate(zip(infos, gpu_s, strict=True))
        )
        costs = np.asarray([cost for each in self.ranges for cost in each["costs"]])
        sharing = merged([PlanSharing.model_validate(each["sharing"]) for each in self.ranges])
        return PlanContent(
            counts=counts,
            files=self.files,
            row_parts=tuple(file.num_rows for file in self.row_files),
            shards=shards,
            learned=None if learned is None else learned.by_length,
            estimate=estimate,
            sharing=sharing,
            imbalance=imbalance(costs),
        )

    def _estimate(self, given: Given) -> tuple[CostEstimate | None, Sequence[float | None]]:
        """The estimate of the whole plan, and each shard's part of its GPU seconds."""
        total, unshared = Work(), Work()
        for each in self.ranges:
            total, unshared = total + Work(**each["work"]), unshared + Work(**each["unshared"])
        per_shard = WorkArrays(
            *(
                np.asarray([n for each in self.ranges for n in each["per_shard"][field.name]])
                for field in fields(WorkArrays)
            )
        )
        bounds = np.arange(len(per_shard.num_prefill_tokens) + 1)
        found = None
        if given.target is not None:
            replicas = given.spec.engine.replicas
            found = estimate_work(given.target, per_shard, total, unshared, bounds, replicas)
        return (
            (None, [None] * (len(bounds) - 1)) if found is None else (found[0], found[1].tolist())
        )
