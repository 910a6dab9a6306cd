"""The task of one range: from sorted prompts to the files of its shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchllm_operator.plan.planned_range import PlannedRange, RangePlanner
from batchllm_operator.prefixes import PromptStore, RankedPrompts, TokenTable, num_equal
from batchllm_operator.prefixes.jit import compiled
from batchllm_operator.spark.prompts import PartResult, Task
from batchllm_operator.spark.ranges import key_array, tokens_of
from batchllm_operator.spark.staging import StagedFile, scratch_folder
from batchllm_operator.spark.tasks import REPORTS, Batches, mapped, numbered, reported, reports_of
from batchllm_operator.stored_plan.counts import Frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ID_BITS: Final = 32
"""The range's number, shifted by this, is the first id of its requests and groups."""


class RangeResult(Frozen):
    """What the task of a range reports."""

    number: int
    planned: PlannedRange
    files: tuple[StagedFile, ...]
    first: str
    """The key of its first prompt, in hexadecimal digits."""
    last: str


def plan_ranges(prompts: DataFrame, task: Task) -> tuple[list[PartResult], list[RangeResult]]:
    """The reports of parts and of planned ranges, in order; raises as `rows_of`."""
    reports = reports_of(mapped(prompts, partial(_reports, task)), PartResult | RangeResult)
    reports.sort(key=lambda report: report.number)
    parts = [report for report in reports if isinstance(report, PartResult)]
    return parts, [report for report in reports if isinstance(report, RangeResult)]


def _reports(task: Task, batches: Batches) -> Iterator[pa.RecordBatch]:
    """The report of a range; in the range after the last one, those of parts."""
    number, batches = numbered(batches)
    if number == len(task.ranges):
        for batch in batches:
            yield pa.RecordBatch.from_arrays([batch.column("key")], schema=REPORTS)
    elif number is not None:
        yield reported(_planned(task, number, batches))


def _planned(task: Task, number: int, batches: Iterator[pa.RecordBatch]) -> RangeResult:
    """Write the range's shards; it has at least one prompt."""
    planner = _planner_of(task, number)
    tokenizers, adapters = task.reading.tokenizers()
    shared, places, estimates = [], [], []
    first = last = b""
    before = np.zeros(0, dtype=np.int32)
    with scratch_folder() as scratch, PromptStore(scratch / "prompts.bin") as store:
        for batch in batches:
            tokens = _tokens(batch.column("key"))
            shared.append(_num_shared(before, tokens.token_ids, tokens.offsets))
            places.append(batch.column("place").to_numpy().copy())
            estimates.append(batch.column("output_tokens").to_numpy().copy())
            store.append(tokens)
            begin, last = key_array(tokens.take([0, len(tokens) - 1])).to_pylist()
            first = first or begin
            before = tokens.prompt(len(tokens) - 1)
        ranked = RankedPrompts(np.arange(len(store)), np.concatenate(shared))
        row_idxs, expected = task.numbers.of(np.concatenate(places)), np.concatenate(estimates)
        planned = planner.plan(
            store,
            ranked,
            row_idxs,
            expected if expected[0] >= 0 else None,
            tokenizers[0],
            adapters,
            scratch,
            number << _ID_BITS,
        )
        files = tuple(
            task.staging.publish(scratch / shard.file, "shard", shard.num_requests)
            for shard in planned.shards
        )
    return RangeResult(
        number=number, planned=planned, files=files, first=first.hex(), last=last.hex()
    )


def _planner_of(task: Task, number: int) -> RangePlanner:
    """The job's, with this range's number of shards."""
    spec = task.planner.spec
    planner = spec.planner.model_copy(update={"num_shards": task.ranges.num_shards[number]})
    replicas = task.planner.replicas
    if replicas is not None and number:  # one shard's run measures
        replicas = replace(replicas, wants_profile=False)
    spec = spec.model_copy(update={"planner": planner})
    return replace(task.planner, spec=spec, replicas=replicas)


def _tokens(keys: pa.Array) -> TokenTable:
    whole = pa.concat_arrays([keys.cast(pa.large_binary())])  # begins where its buffers do
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[whole.offset :][: len(whole) + 1]
    return tokens_of(np.frombuffer(data or b"", dtype=np.uint8), ends)


@compiled
def _num_shared(
    before: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """LCP of each prompt with the one before it; `before` is the one before the first."""
    shared = np.empty(len(offsets) - 1, dtype=np.int64)
    for idx in range(len(shared)):
        prompt = token_ids[offsets[idx] : offsets[idx + 1]]
        most = min(len(before), len(prompt))
        shared[idx] = num_equal(before[:most], prompt[:most])
        before = prompt
    return shared
