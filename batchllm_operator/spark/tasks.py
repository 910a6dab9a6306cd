"""Runs our functions in Spark's tasks, and brings back values and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pydantic import TypeAdapter
from pydantic_core import to_json

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.prompts import TokenIdsDifferError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

REPORTS: Final = pa.schema([("report", pa.binary())])
"""Columns of what `reports_of` reads: values as JSON."""
_MOST_REASON: Final = 500

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


class SparkJobError(BatchLLMError):
    """Spark gave up on a job: tasks failed again and again, or it can't be reached."""


class TaskError(Exception):
    """An error of ours in a task, as one line of JSON, which survives the way to the driver."""

    @classmethod
    def of(cls, error: Exception) -> TaskError:
        kind = type(error)
        return cls(json.dumps([f"{kind.__module__}:{kind.__qualname__}", str(error)]))

    @classmethod
    def in_text(cls, text: str) -> Exception | None:
        """The error that a task's traceback ends with, if it is one of ours."""
        match = re.search(rf"^.*\b{cls.__name__}: (\[.*\])$", text, re.MULTILINE)
        if match is None:
            return None
        kind, message = json.loads(match[1])
        error: Exception = resolve_name(kind)(message)
        return error


def tasks(
    spark: SparkSession,
    items: Sequence[Any],
    kind: Any,
    work: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: pa.Schema = REPORTS,
) -> DataFrame:
    """A data frame of what `work` makes of each item, a task each; see `mapped`.

    Items are of a type `kind` that pydantic writes as JSON and reads.
    """
    from pyspark.sql.functions import col

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        read = TypeAdapter(kind).validate_json
        for batch in batches:
            for item in batch.column(0).to_pylist():
                yield from work(read(item))

    rows = [(idx, bytearray(encoded(item))) for idx, item in enumerate(items)]
    frame = spark.createDataFrame(rows, "task int, item binary")
    dealt = frame.repartitionById(max(1, len(rows)), col("task")).select("item")
    return mapped(dealt, run, schema)


def encoded(item: Any) -> bytes:
    """An item as JSON; values of partition columns in it are as `scalar_of` takes them."""
    return to_json(item, bytes_mode="hex", inf_nan_mode="strings")


def mapped(frame: DataFrame, work: Task, schema: pa.Schema = REPORTS) -> DataFrame:
    """A data frame of what `work` makes of each partition's batches: batches of `schema`.

    Errors of ours that it raises reach the driver as they are.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        try:
            yield from work(batches)
        except (BatchLLMError, TokenIdsDifferError) as error:
            raise TaskError.of(error) from error
        finally:
            # Spark's next task may run in another process of the executor.
            pa.default_memory_pool().release_unused()

    return frame.mapInArrow(run, from_arrow_schema(schema))


def rows_of(frame: DataFrame) -> list[Row]:
    """All rows of a data frame that tasks make; raises as `named_failures`."""
    with named_failures("Spark's job failed"):
        return frame.collect()


def reports_of(frame: DataFrame, kind: Any) -> list[Any]:
    """All values of a type that tasks have `reported`; raises as `rows_of`."""
    read = TypeAdapter(kind).validate_json
    return [read(bytes(row[0])) for row in rows_of(frame)]


def reported(*values: Any) -> pa.RecordBatch:
    """In a task: values for `reports_of`."""
    return pa.record_batch([pa.array(map(to_json, values), pa.binary())], schema=REPORTS)


@contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Errors of pyspark become ours.

    Raises:
        KeyboardInterrupt: what the context was stopped by. pyspark's errors may hide it.
        BatchLLMError, TokenIdsDifferError: the one that a task raised.
        SparkJobError: says `what` has happened, and why.
    """
    try:
        yield
    except BatchLLMError:
        raise
    # They have no common base below Exception: Py4J's, its own, gRPC's.
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        failure = TaskError.in_text(str(error)) or SparkJobError(f"{what}: {reason_of(error)}")
        raise failure from error


def numbered(batches: Batches) -> tuple[int | None, Iterator[pa.RecordBatch]]:
    """In a task: the number in the first column of a partition, and its batches; None if empty."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return None, filled
    return first.column(0)[0].as_py(), chain([first], filled)


def reason_of(error: Exception) -> str:
    """The line that says what happened: the last of a task's traceback, or the error's first."""
    from py4j.protocol import Py4JNetworkError

    if isinstance(error, (ConnectionError, Py4JNetworkError)):
        return f"the driver's Java process has ended ({error})"
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt)\b", line)]
    reasons = errors[-1:] or [line for line in lines if line][:1] or [type(error).__name__]
    return reasons[0][:_MOST_REASON]
