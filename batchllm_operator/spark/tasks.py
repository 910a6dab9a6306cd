"""Runs our functions in Spark's tasks, counts tasks, and brings back values and errors."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from batchllm_operator.errors import BatchLLMError
from batchllm_operator.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_REPORTS: Final = pa.schema([("report", pa.binary())])
_MOST_REASON: Final = 500
_POLL_S: Final = 1.0

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Iterator[pa.RecordBatch]]


class SparkJobError(BatchLLMError):
    """Spark gave up on a job: tasks failed again and again, or it can't be reached."""


class TaskError(Exception):
    """An error of ours in a task, as one line of JSON, which survives the way to the driver."""

    @classmethod
    def of(cls, error: BatchLLMError) -> TaskError:
        kind = type(error)
        return cls(json.dumps([f"{kind.__module__}:{kind.__qualname__}", str(error)]))

    @classmethod
    def in_text(cls, text: str) -> BatchLLMError | None:
        """The error that a task's traceback ends with, if it is one of ours."""
        match = re.search(rf"^.*\b{cls.__name__}: (\[.*\])$", text, re.MULTILINE)
        if match is None:
            return None
        kind, message = json.loads(match[1])
        error: BatchLLMError = resolve_name(kind)(message)
        return error


def tasks(spark: SparkSession, payloads: Sequence[bytes]) -> DataFrame:
    """A task for each payload: a data frame with one row per partition, its column `payload`."""
    from pyspark.sql.functions import col

    rows = [(idx, bytearray(payload)) for idx, payload in enumerate(payloads)]
    frame = spark.createDataFrame(rows, "task int, payload binary")
    return frame.repartitionById(max(1, len(rows)), col("task")).select("payload")


def mapped(frame: DataFrame, work: Task, schema: pa.Schema) -> DataFrame:
    """A data frame of what `work` makes of each partition.

    Args:
        work: gets a partition's batches. Its `BatchLLMError`s reach the driver as they are.
        schema: of its batches.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        try:
            yield from work(batches)
        except BatchLLMError as error:
            raise TaskError.of(error) from error
        finally:
            # Spark's next task may run in another process of the executor.
            pa.default_memory_pool().release_unused()

    return frame.mapInArrow(run, from_arrow_schema(schema))


def reports_of(frame: DataFrame, work: Task) -> list[bytes]:
    """All values that `work`, given each partition of `frame`, yields by `reported`.

    Raises:
        BatchLLMError: the one that a task raised.
        SparkJobError: the job failed for another reason: the last line of a task's traceback.
    """
    with named_failures("Spark's job failed"):
        return [bytes(row[0]) for row in mapped(frame, work, _REPORTS).collect()]


@contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Errors of pyspark become ours.

    Raises:
        KeyboardInterrupt: what the context was stopped by. pyspark's errors may hide it.
        BatchLLMError: the one that a task raised.
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


def reported(values: Sequence[bytes]) -> pa.RecordBatch:
    """In a task: values for `reports_of`."""
    return pa.record_batch([pa.array(values, pa.binary())], schema=_REPORTS)


def numbered(batches: Batches) -> tuple[int | None, Iterator[pa.RecordBatch]]:
    """In a task: the number in the first column of a partition, and its batches; None if empty."""
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return None, filled
    return first.column(0)[0].as_py(), chain([first], filled)


def payloads_in(batches: Batches) -> Iterator[bytes]:
    """In a task: the payloads that it is given."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


def reason_of(error: Exception) -> str:
    """The line of an error that says what happened: the last of a task's traceback, or the first.

    Texts of Java's errors go on with stack traces.
    """
    from py4j.protocol import Py4JNetworkError

    if isinstance(error, (ConnectionError, Py4JNetworkError)):
        return f"the driver's Java process has ended ({error})"
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    errors = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Interrupt)\b", line)]
    reasons = errors[-1:] or [line for line in lines if line][:1] or [type(error).__name__]
    return reasons[0][:_MOST_REASON]


@contextmanager
def counted(spark: SparkSession, progress: Progress, num_tasks: int, note: str) -> Iterator[None]:
    """Advances `progress` by the context's tasks as they end, in the end by all of them.

    Spark Connect doesn't tell, and of a session that others use, too, all tasks count.

    Args:
        num_tasks: those that the context will run; Spark adds a few of its own.
        note: what they do.
    """
    try:
        tracker: Any = spark.sparkContext.statusTracker()
    except Exception:  # noqa: BLE001 - an error of Spark Connect's own, as it has no context
        tracker = None
    stop = threading.Event()
    num_shown, ended = 0, dict[int, int]()  # by stage

    def watch() -> None:
        nonlocal num_shown
        with suppress(Exception):  # the context meets it, too
            while tracker is not None and not stop.wait(_POLL_S):
                for stage in {*ended, *tracker.getActiveStageIds()}:
                    if (info := tracker.getStageInfo(stage)) is not None:  # of its last attempt
                        ended[stage] = max(info.numCompletedTasks, ended.get(stage, 0))
                num_ended = min(sum(ended.values()), num_tasks)
                progress.advance(num_ended - num_shown, note)
                num_shown = num_ended

    progress.advance(0, note)
    watcher = threading.Thread(target=watch, name="batchllm-spark-tasks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    progress.advance(num_tasks - num_shown, note)
