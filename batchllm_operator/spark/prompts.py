"""The tasks that make prompts: they read, render and tokenize rows, and send each to its range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from batchllm_operator.plan.planned_range import RangePlanner
from batchllm_operator.plan.rows.reading import (
    NO_ROWS,
    Tokenized,
    checked,
    open_rows_file,
    tokenize,
)
from batchllm_operator.spark.ranges import Place, Ranges, key_array
from batchllm_operator.spark.reading import Part, Reading, RowNumbers
from batchllm_operator.spark.staging import StagedFile, Staging, scratch_folder
from batchllm_operator.spark.tasks import rows_of, tasks
from batchllm_operator.stored_plan.counts import Frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA: Final = pa.schema(
    {"range": pa.int32()}
    | dict.fromkeys(("head", "key"), pa.binary())
    | dict.fromkeys(("place", "output_tokens"), pa.int64())
)
"""Columns of prompts on their way to their ranges. `output_tokens` is -1 without estimates. In the
range after the last one, a task reports as JSON, in place of a key, what it has done."""
_PLACES: Final = pa.schema([("key", pa.binary()), ("place", pa.int64())])
"""Columns of the sample."""
_ROWS_PER_SAMPLE: Final = 32
_LEAST_SAMPLE: Final = 2_048
_MOST_SAMPLE: Final = 1 << 16
_MOST_SAMPLE_BYTES: Final = 256 << 20
_MOST_PARTS: Final = 1024
"""Parts that are read for the sample."""
_ENOUGH: Final = 16
"""Rows that are read, the first ones of parts, for each that is wanted."""


@dataclass(frozen=True, slots=True)
class Task:
    """What each task is given that makes prompts or plans a range."""

    reading: Reading
    numbers: RowNumbers
    staging: Staging
    ranges: Ranges
    planner: RangePlanner


class PartResult(Frozen):
    """What the task of a part reports."""

    number: int
    file: StagedFile
    """The part's rows."""
    counts: dict[str, int]
    """Fields of `PlanCounts` that reading rows tells."""


def draw_sample(
    spark: SparkSession, reading: Reading, parts: Sequence[Part], numbers: RowNumbers
) -> list[Place]:
    """Keys and places of some prompts, sorted: which ones is a function of the snapshot alone."""
    wanted = min(max(numbers.num_rows // _ROWS_PER_SAMPLE, _LEAST_SAMPLE), _MOST_SAMPLE)
    by_hash = sorted(parts, key=lambda part: blake2b(str(part.number).encode()).digest())
    chosen = sorted(by_hash[:_MOST_PARTS], key=lambda part: part.number)
    most = -(-_ENOUGH * wanted // len(chosen))
    num_rows = np.minimum(np.diff(numbers.firsts), most)[[part.number for part in chosen]].sum()
    share = min(1.0, wanted / max(1, int(num_rows)))

    sample = partial(_sampled, reading, share, most)
    drawn = rows_of(tasks(spark, chosen, Part, sample, _PLACES))
    places = sorted((bytes(key), place) for key, place in drawn)
    num_bytes = sum(len(key) for key, _ in places)
    return places[:: max(1, -(-num_bytes // _MOST_SAMPLE_BYTES))]


def make_prompts(spark: SparkSession, task: Task, parts: Sequence[Part]) -> DataFrame:
    """A data frame of prompts, each in the partition of its range, sorted."""
    from pyspark.sql.functions import col

    prompts = tasks(spark, parts, Part, partial(_made, task), _SCHEMA)
    dealt = prompts.repartitionById(len(task.ranges) + 1, col("range"))
    return dealt.sortWithinPartitions("head", "key", "place").drop("head")


def _sampled(reading: Reading, share: float, num_rows: int, part: Part) -> Iterator[pa.RecordBatch]:
    """The key and the place of each prompt that is drawn from the part's first rows."""
    tokenizers, adapters = reading.tokenizers()
    drawn: list[int] = []
    batches = _drawn(reading, part, share, num_rows, drawn)
    for piece in tokenize(reading.spec, batches, tokenizers, adapters):
        rows, asked = np.divmod(piece.row_idxs, len(tokenizers))
        places = np.array(drawn, dtype=np.int64)[rows] * len(tokenizers) + asked + part.first_place
        columns = [key_array(piece.tokens), pa.array(places)]
        yield pa.RecordBatch.from_arrays(columns, schema=_PLACES)


def _drawn(
    reading: Reading, part: Part, share: float, num_rows: int, drawn: list[int]
) -> Iterator[pa.RecordBatch]:
    """Batches of the drawn rows; adds their positions among the part's rows to `drawn`."""
    first, end = part.first_place, part.first_place + num_rows
    for batch in reading.scan(part, reading.spec.input_columns):
        batch = batch.slice(0, end - first)
        places = first + np.arange(batch.num_rows)
        first += batch.num_rows
        # A multiplicative hash (Knuth): those of neighbours are far from each other.
        mixed = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        is_drawn = (mixed >> np.uint64(11)) < np.uint64(int(share * (1 << 53)))
        drawn += (places[is_drawn] - part.first_place).tolist()
        yield batch.filter(pa.array(is_drawn))
        if first == end:
            return


def _made(task: Task, part: Part) -> Iterator[pa.RecordBatch]:
    """Prompts with their ranges; then the task's report, its file of rows included."""
    reading, spec = task.reading, task.reading.spec
    tokenizers, adapters = reading.tokenizers()
    counts = Counter(NO_ROWS)
    with scratch_folder() as scratch:
        path = scratch / "rows"
        with open_rows_file(path, spec, reading.snapshot.schema) as writer:
            scanned = reading.scan(part, spec.input_columns)
            first_row = int(task.numbers.firsts[part.number])
            batches = checked(spec, scanned, reading.where, first_row, reading.stored)
            for piece in tokenize(spec, batches, tokenizers, adapters):
                counts.update(piece.counts)
                if piece.kept is not None:
                    writer.write_table(piece.kept)
                if len(piece.tokens):
                    yield _sent(task.ranges, part.first_place, piece)
        file = task.staging.publish(path, "rows", counts["num_rows"] // len(tokenizers))
    result = PartResult(number=part.number, file=file, counts=counts)
    row = {"range": len(task.ranges), "head": b"", "key": result.model_dump_json().encode()}
    row |= {"place": part.number, "output_tokens": 0}
    yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def _sent(ranges: Ranges, first: int, piece: Tokenized) -> pa.RecordBatch:
    places = first + piece.row_idxs
    keys = key_array(piece.tokens)
    estimates = piece.estimates
    if estimates is None:
        estimates = np.full(len(keys), -1, dtype=np.int64)
    numbers = ranges.numbers(keys, places)
    columns = [
        pa.array(numbers, pa.int32()),
        ranges.heads(keys, numbers),
        keys,
        pa.array(places),
        pa.array(estimates),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
